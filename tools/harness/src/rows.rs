//! Routing that is made up, so that rows lie as a test wants.

use moesaic_reference::Random;
use moesaic_spec::LayerSpec;

/// Where the assignments go.
#[derive(Clone, Copy, Debug)]
pub enum Spread {
    /// Anywhere, some to nobody.
    Random,
    /// Anywhere but to every fifth expert from the second on, some to nobody.
    Gaps,
    /// All to the last expert.
    One,
    /// To every third expert.
    Sparse,
}

impl Spread {
    /// The expert of an assignment with these random bits.
    fn expert(self, bits: usize, experts: usize) -> Option<usize> {
        let anywhere = Some(bits % (experts + 1)).filter(|&e| e < experts);
        match self {
            Spread::Random => anywhere,
            Spread::Gaps => anywhere.filter(|e| experts == 1 || e % 5 != 1),
            Spread::One => Some(experts - 1),
            Spread::Sparse => Some(bits % experts.div_ceil(3) * 3),
        }
    }
}

/// Tokens and where they go: the rows are the slots of one expert after the other.
pub struct Rows {
    /// How many tokens.
    pub tokens: usize,
    /// Expert and slot of each row, ascending.
    pub list: Vec<(usize, usize)>,
}

impl Rows {
    /// Drawn from the number of tokens.
    pub fn new(spec: &LayerSpec, tokens: usize, spread: Spread) -> Rows {
        Rows::drawn(spec, tokens, spread, &mut Random::new(tokens as u64 + 1))
    }

    /// Drawn from `random`.
    pub fn drawn(spec: &LayerSpec, tokens: usize, spread: Spread, random: &mut Random) -> Rows {
        let mut expert = || spread.expert(random.bits() as usize, spec.shape.experts);
        let slots = 0..tokens * spec.shape.top_k;
        let mut list: Vec<_> = slots.filter_map(|slot| Some((expert()?, slot))).collect();
        list.sort();
        Rows { tokens, list }
    }

    /// The same tokens, last first, each with its slots turned too.
    pub fn reversed(&self, top_k: usize) -> Rows {
        let last = self.tokens * top_k - 1;
        let mut list: Vec<_> = self
            .list
            .iter()
            .map(|&(e, slot)| (e, last - slot))
            .collect();
        list.sort();
        Rows { list, ..*self }
    }

    /// How many rows.
    pub fn count(&self) -> usize {
        self.list.len()
    }

    /// The first row of every expert, then that beyond the last.
    pub fn offsets(&self, experts: usize) -> Vec<usize> {
        let before = |e| self.list.iter().filter(|row| row.0 < e).count();
        (0..=experts).map(before).collect()
    }

    /// The first row tile of every expert, then that beyond the last.
    fn row_tiles(&self, experts: usize, tile_rows: usize) -> Vec<usize> {
        let mut tiles = vec![0];
        for pair in self.offsets(experts).windows(2) {
            let own = (pair[1] - pair[0]).div_ceil(tile_rows);
            tiles.push(tiles[tiles.len() - 1] + own);
        }
        tiles
    }

    /// The values of a tensor that the scan writes and products read.
    pub fn scanned(&self, name: &str, experts: usize, tile_rows: usize) -> Option<Vec<f64>> {
        let list = match name {
            "offsets" => self.offsets(experts),
            "row_tiles" => self.row_tiles(experts, tile_rows),
            "row_slots" => self.list.iter().map(|row| row.1).collect(),
            _ => return None,
        };
        Some(list.into_iter().map(|n| n as f64).collect())
    }
}
