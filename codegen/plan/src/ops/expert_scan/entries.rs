//! The entries of `expert_scan`.

use super::{CountedBy, ExpertScanConfig, ExpertScanDesc, ScanTile};
use crate::ops::gate_topk::rng_key_params;
use crate::ops::params::{entry, one, slots_by, some, tokens_by, when};
use moesaic_kernel::DType::{self, F32, I32, I64};
use moesaic_kernel::{Access, Entry, Param, Size};
use moesaic_spec::{CapacityMode, CapacityOrder};
use std::iter;

/// Tokens per block that rescales their weights.
const HELPER_TILE: usize = 64;

pub(super) fn entries(d: &ExpertScanDesc, c: &ExpertScanConfig) -> Vec<Entry> {
    let counts = c.counted_by == CountedBy::Scan;
    // Tiles take tokens in the order of their rank, so tokens are ranked before anything is
    // counted. Ranks inside an expert need the lists of experts, which `place` leaves, so they come
    // behind it.
    let list = [
        d.ordered().then(|| sort(d, c)).flatten(),
        d.ordered().then(|| order(d, c)),
        counts.then(|| count(d, c)),
        Some(match c.sum_experts {
            Some(experts) => sum(d, c, experts),
            None => offsets(d, c),
        }),
        Some(place(d, c)),
        d.ranked().then(|| sort(d, c)).flatten(),
        d.ranked().then(|| rank(d, c)),
        d.capacity.renormalize_after_drop.then(|| renormalize(d, c)),
    ];
    list.into_iter().flatten().collect()
}

fn sort(d: &ExpertScanDesc, c: &ExpertScanConfig) -> Option<Entry> {
    let run = c.sort_run? as u64;
    let per_slot = format!("[tokens, {}]", d.top_k);
    let by_weight = d.capacity.order == CapacityOrder::Probability;
    let slots = Param::tensor("bucket_slots", I32, Access::ReadWrite, "[tokens*top_k]");
    let params = some([
        when(d.ordered(), Param::read("best_score", F32, "[tokens]")),
        when(d.ranked(), d.ids()),
        when(by_weight, Param::read("topk_weights", F32, per_slot)),
        when(
            d.ranked(),
            d.per_expert("bucket_offsets", I64, Access::Read),
        ),
        when(d.ranked(), slots),
        Some(d.sorted_keys(Access::Write)),
    ]);
    let params = params.into_iter().chain(d.rng_key_params()).collect();
    let grid = [d.sorted_items()?.ceil_div(run), one()];
    let summary = if d.ordered() {
        "sorts runs of tokens by best score"
    } else {
        "sorts runs of the lists by expert and key"
    };
    Some(entry("expert_scan_sort", summary, params, grid, c.threads))
}

fn order(d: &ExpertScanDesc, c: &ExpertScanConfig) -> Entry {
    let order = Param::write("token_order", I32, "[tokens]");
    let (params, grid) = match c.sort_run {
        // Sorted runs are small enough for many blocks: a thread finds a token's rank by a search
        // in each run.
        Some(_) => (
            vec![d.sorted_keys(Access::Read), order],
            [tokens_by(c.threads as usize), one()],
        ),
        // A whole list is sorted by one block, and all tokens are one list.
        None => (
            vec![
                Param::read("best_score", F32, "[tokens]"),
                d.sort_items(),
                order,
            ],
            [one(), one()],
        ),
    };
    let summary = "ranks tokens by descending best score, stable";
    entry("expert_scan_order", summary, params, grid, c.threads)
}

fn count(d: &ExpertScanDesc, c: &ExpertScanConfig) -> Entry {
    let params = some([Some(d.ids()), d.order(), Some(d.tile_counts(Access::Write))]);
    let summary = "counts the assignments of each expert in each tile";
    let grid = d.blocks_of_tiles(c);
    entry("expert_scan_count", summary, params, grid, c.threads)
}

/// Returns the entry that turns counts of tiles into counts of all tiles before.
fn sum(d: &ExpertScanDesc, c: &ExpertScanConfig, experts: usize) -> Entry {
    let params = vec![d.tile_counts(Access::ReadWrite), d.counts(Access::Write)];
    // A block sums few experts over all tiles, so that more than one multiprocessor reads the
    // counts.
    let columns = d.routed_experts.div_ceil(experts) as u64;
    let grid = [Size::Const(columns), one()];
    let summary = "sums the counts of each expert over all tiles";
    entry("expert_scan_sum", summary, params, grid, c.scan_threads)
}

/// Returns the entry that does the work of `sum`, then that of the first block of `place`.
fn offsets(d: &ExpertScanDesc, c: &ExpertScanConfig) -> Entry {
    let head = [
        Some(d.tile_counts(Access::ReadWrite)),
        Some(d.counts(Access::Write)),
    ];
    let params = some(head.into_iter().chain(d.edges()).chain([d.row_limit()]));
    let summary = "sums counts to offsets, applies the capacity rule, lists row tiles";
    let grid = [one(), one()];
    entry("expert_scan_offsets", summary, params, grid, c.scan_threads)
}

fn place(d: &ExpertScanDesc, c: &ExpertScanConfig) -> Entry {
    let ids = some([Some(d.ids()), d.order(), Some(d.tile_counts(Access::Read))]);
    let summed = c.sum_experts.is_some();
    let starts = match (summed, d.ranked()) {
        (true, _) => some(iter::once(Some(d.counts(Access::Read))).chain(d.edges())),
        (false, true) => vec![d.per_expert("bucket_offsets", I64, Access::Read)],
        (false, false) => some(d.kept()),
    };
    let to = if d.ranked() {
        some(d.listing(c))
    } else {
        d.placement().to_vec()
    };
    let limit = summed.then(|| d.row_limit()).flatten();
    let params = [ids, starts, to, limit.into_iter().collect()].concat();
    let summary = if d.ranked() {
        "lists the assignments of each expert"
    } else {
        "gives every assignment its location and row"
    };
    let tiles = d.tiles(c).ceil_div(c.block_tiles as u64);
    // The first block has more to do than to place, even without tokens.
    let blocks = if summed {
        Size::up_to(0, one(), tiles)
    } else {
        tiles
    };
    let grid = [blocks, one()];
    entry("expert_scan_place", summary, params, grid, c.threads)
}

/// Returns the entry that ranks: a thread searches in sorted runs, or a block sorts the list of an
/// expert.
fn rank(d: &ExpertScanDesc, c: &ExpertScanConfig) -> Entry {
    let whole = c.sort_run.is_none();
    let by_weight = whole && d.capacity.order == CapacityOrder::Probability;
    let weights = Param::read("topk_weights", F32, format!("[tokens, {}]", d.top_k));
    let head = [
        when(!whole, d.ids()),
        when(by_weight, weights),
        Some(d.per_expert("bucket_offsets", I64, Access::Read)),
        Some(Param::read("bucket_slots", I32, "[tokens*top_k]")),
        Some(if whole {
            d.sort_items()
        } else {
            d.sorted_keys(Access::Read)
        }),
    ];
    let to = d.kept().into_iter().chain(d.placement().map(Some));
    let params = some(head.into_iter().chain(to));
    let drawn = whole.then(|| d.rng_key_params()).into_iter().flatten();
    let params = params.into_iter().chain(drawn).collect();
    let blocks = if whole {
        Size::Const(d.experts as u64)
    } else {
        slots_by(d.top_k, c.threads.into())
    };
    let summary = "ranks the assignments of each expert and gives them rows";
    entry(
        "expert_scan_rank",
        summary,
        params,
        [blocks, one()],
        c.threads,
    )
}

fn renormalize(d: &ExpertScanDesc, c: &ExpertScanConfig) -> Entry {
    let weights = format!("[tokens, {}]", d.top_k);
    let params = some([
        Some(Param::read("topk_ids", I32, &weights)),
        Some(Param::read("slot_rows", I32, &weights)),
        Some(Param::tensor(
            "topk_weights",
            F32,
            Access::ReadWrite,
            &weights,
        )),
        when(d.keep_sums, Param::write("kept_sums", F32, "[tokens]")),
    ]);
    let grid = [tokens_by(HELPER_TILE), one()];
    let summary = "rescales weights over the assignments that got a row";
    entry("expert_scan_renormalize", summary, params, grid, c.threads)
}

impl ExpertScanDesc {
    /// Returns whether tokens are placed in the order of `token_order`.
    pub fn ordered(&self) -> bool {
        self.capacity.order == CapacityOrder::BatchPrioritized
    }

    /// Returns whether assignments are ranked inside their expert by a key.
    pub fn ranked(&self) -> bool {
        matches!(
            self.capacity.order,
            CapacityOrder::Probability | CapacityOrder::Random
        )
    }

    /// Returns whether there is a capacity.
    pub fn limited(&self) -> bool {
        self.capacity.mode != CapacityMode::Dropless
    }

    /// Returns the rows of `tile_counts`.
    pub fn tiles(&self, c: &ExpertScanConfig) -> Size {
        let by_token = self.capacity.order == CapacityOrder::TokenMajor;
        match c.tile {
            ScanTile::Assignments(count) => slots_by(self.top_k, count as u64),
            ScanTile::Tokens(count) if by_token => tokens_by(count),
            ScanTile::Tokens(count) => tokens_by(count) * self.top_k as u64,
        }
    }

    /// Returns the number of items that an order sorts, tokens or assignments; `None` without keys.
    pub fn sorted_items(&self) -> Option<Size> {
        match self.capacity.order {
            CapacityOrder::BatchPrioritized => Some(Size::Tokens),
            CapacityOrder::Probability | CapacityOrder::Random => {
                Some(Size::Tokens * self.top_k as u64)
            }
            CapacityOrder::SlotMajor | CapacityOrder::TokenMajor => None,
        }
    }

    /// Returns the parameters of the random order.
    fn rng_key_params(&self) -> impl Iterator<Item = Param> {
        self.drawn.then(rng_key_params).into_iter().flatten()
    }

    fn sorted_keys(&self, access: Access) -> Param {
        let items = if self.ordered() {
            "[tokens]"
        } else {
            "[tokens*top_k]"
        };
        Param::tensor("sorted_keys", I64, access, items)
    }

    /// Returns the scratch of a block that sorts a whole list: its items, and as much room again.
    fn sort_items(&self) -> Param {
        let shape = if self.ordered() {
            "[2, tokens]"
        } else {
            "[2, tokens*top_k]"
        };
        Param::tensor("sort_items", I64, Access::ReadWrite, shape)
    }

    fn blocks_of_tiles(&self, c: &ExpertScanConfig) -> [Size; 2] {
        [self.tiles(c).ceil_div(c.block_tiles as u64), one()]
    }

    fn ids(&self) -> Param {
        Param::read("topk_ids", I32, format!("[tokens, {}]", self.top_k))
    }

    fn order(&self) -> Option<Param> {
        when(self.ordered(), Param::read("token_order", I32, "[tokens]"))
    }

    fn tile_counts(&self, access: Access) -> Param {
        let shape = format!("[tiles, {}]", self.routed_experts);
        Param::tensor("tile_counts", I32, access, shape)
    }

    fn counts(&self, access: Access) -> Param {
        Param::tensor("counts", I64, access, format!("[{}]", self.routed_experts))
    }

    /// Returns the results that follow from the counts of all tokens.
    fn edges(&self) -> [Option<Param>; 5] {
        let bounded = self.capacity.mode == CapacityMode::Bounded;
        let lists = self.per_expert("bucket_offsets", I64, Access::Write);
        [
            when(self.limited(), Param::write("capacity", I64, "[1]")),
            when(bounded, Param::write("overflow", I64, "[1]")),
            Some(self.per_expert("offsets", I64, Access::Write)),
            Some(self.per_expert("row_tiles", I32, Access::Write)),
            when(self.ranked(), lists),
        ]
    }

    /// Returns the scalar that sets the capacity.
    fn row_limit(&self) -> Option<Param> {
        when(self.capacity.has_factor(), Param::i64("row_limit"))
    }

    fn per_expert(&self, name: &str, dtype: DType, access: Access) -> Param {
        Param::tensor(name, dtype, access, format!("[{}]", self.experts + 1))
    }

    /// Returns the lists of the experts. The kernel that ranks in sorted runs marks assignments in
    /// no list; the kernel that sorts a list sees only that list.
    fn listing(&self, c: &ExpertScanConfig) -> Vec<Option<Param>> {
        let per_slot = format!("[tokens, {}]", self.top_k);
        let marks = c.sort_run.is_none();
        vec![
            Some(Param::write("bucket_slots", I32, "[tokens*top_k]")),
            when(marks, Param::write("locations", I32, &per_slot)),
            when(marks, Param::write("slot_rows", I32, &per_slot)),
        ]
    }

    /// Returns the first row of each expert, and the rows that it may have.
    fn kept(&self) -> [Option<Param>; 2] {
        [
            Some(self.per_expert("offsets", I64, Access::Read)),
            when(self.limited(), Param::read("capacity", I64, "[1]")),
        ]
    }

    /// Returns the results of placement.
    fn placement(&self) -> [Param; 3] {
        let per_slot = format!("[tokens, {}]", self.top_k);
        [
            Param::write("locations", I32, &per_slot),
            Param::write("slot_rows", I32, &per_slot),
            Param::write("row_slots", I32, "[rows]"),
        ]
    }
}
