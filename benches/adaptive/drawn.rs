//! Layers that are drawn by number, and the tokens of their ranks.

use crate::Result;
use moesaic::plan::CommDtype;
use moesaic::reference::{Random, Skew};
use moesaic::{Input, LayerSpec, Parallel, Strategy, Tensor};
use std::fmt;

/// Ranks of all layers: four nodes of four.
pub const RANKS: usize = 16;

/// A layer on ranks.
#[derive(Clone, Debug)]
pub struct Drawn {
    pub number: u64,
    /// Tokens of each rank.
    pub tokens: usize,
    pub model_dim: usize,
    pub hidden_dim: usize,
    pub experts: usize,
    pub top_k: usize,
    pub mesh: Parallel,
    /// Capacity of an expert as a multiple of the mean; `None` takes all rows.
    pub capacity: Option<f64>,
    pub comm_dtype: CommDtype,
    pub skew: Skew,
}

/// Bytes of the rows of a rank: what is drawn lies between these. Below, links do not bound
/// anything; above, a step takes seconds.
const BYTES: std::ops::RangeInclusive<usize> = (128 << 10)..=(1 << 20);

impl Drawn {
    pub fn new(number: u64) -> Drawn {
        let mut random = Random::new(number.wrapping_mul(0x9e37_79b9));
        loop {
            let drawn = Drawn::draw(number, &mut random);
            let bytes = drawn.tokens * drawn.top_k * drawn.model_dim * 4;
            if BYTES.contains(&bytes) {
                return drawn;
            }
        }
    }

    fn draw(number: u64, random: &mut Random) -> Drawn {
        // A quarter of the layers has slices of experts, for other adaptive parallelism degree.
        let expert_tp = one(random, &[1, 1, 1, 4]);
        Drawn {
            number,
            tokens: one(random, &[64, 128, 256, 512]),
            model_dim: one(random, &[64, 128, 256, 512]),
            hidden_dim: one(random, &[32, 64, 128]),
            experts: one(random, &[16, 32]) / expert_tp,
            top_k: one(random, &[1, 2, 4]),
            mesh: Parallel {
                ep: RANKS / expert_tp,
                expert_tp,
                ..Parallel::default()
            },
            capacity: one(random, &[None, None, Some(1.0), Some(1.5)]),
            comm_dtype: one(
                random,
                &[
                    CommDtype::Unchanged,
                    CommDtype::Unchanged,
                    CommDtype::Bf16,
                    CommDtype::Fp8,
                ],
            ),
            skew: one(random, &[Skew::Uniform, Skew::Uniform, Skew::Zipf(0.8)]),
        }
    }

    /// Bytes of the rows of a rank that one exchange of a forward pass takes along, in as many
    /// chunks as a strategy has.
    pub fn exchanged(&self, strategy: &Strategy) -> usize {
        let row = strategy.comm_dtype.forward.row();
        let values = row.values(self.model_dim, 4);
        self.tokens * self.top_k * values / strategy.overlap_degree.forward
    }

    /// The exponent of Zipf's law that loads of experts follow; 0 where they are alike.
    pub fn zipf(&self) -> f64 {
        match self.skew {
            Skew::Zipf(exponent) => exponent,
            _ => 0.0,
        }
    }

    pub fn spec(&self) -> Result<LayerSpec> {
        let capacity = self.capacity.map_or(String::new(), |factor| {
            format!("capacity = {{ mode = 'factor', factor = {factor:?} }}\n")
        });
        let text = format!(
            "name = 'drawn-{}'
             shape = {{ model_dim = {}, hidden_dim = {}, experts = {}, top_k = {} }}
             router = {{ kind = 'external' }}
             {capacity}",
            self.number, self.model_dim, self.hidden_dim, self.experts, self.top_k
        );
        Ok(LayerSpec::from_toml(&text)?)
    }

    /// Experts of a rank's tokens.
    pub fn ids(&self, rank: usize) -> Vec<i32> {
        let all = self.tokens * RANKS;
        // Of all ranks at once, so that they have the same popular ones.
        let ids = self.skew.draw(self.experts, self.top_k, all, self.number);
        let own = self.tokens * self.top_k;
        ids[rank * own..(rank + 1) * own].to_vec()
    }

    /// Rows that each rank has for each expert before any is dropped.
    pub fn counts(&self) -> Vec<Vec<u64>> {
        let of = |rank: usize| {
            let mut counts = vec![0u64; self.experts];
            self.ids(rank)
                .iter()
                .for_each(|id| counts[*id as usize] += 1);
            counts
        };
        (0..RANKS).map(of).collect()
    }

    pub fn input(&self, rank: usize) -> Input<'static> {
        let mut input = Input {
            tokens: self.tokens,
            ..Input::default()
        };
        input.insert("x", self.noise(2 * rank));
        let shape = [self.tokens, self.top_k];
        input.insert("topk_ids", Tensor::owned(&shape, self.ids(rank)));
        let weights = vec![1.0 / self.top_k as f32; self.tokens * self.top_k];
        input.insert("topk_weights", Tensor::owned(&shape, weights));
        input
    }

    pub fn output_gradient(&self, rank: usize) -> Tensor<'static> {
        self.noise(2 * rank + 1)
    }

    fn noise(&self, stream: usize) -> Tensor<'static> {
        let mut random = Random::new(self.number << 32 | stream as u64);
        let count = self.tokens * self.model_dim;
        let values: Vec<f32> = (0..count).map(|_| random.signed() as f32).collect();
        Tensor::owned(&[self.tokens, self.model_dim], values)
    }
}

fn one<T: Clone>(random: &mut Random, of: &[T]) -> T {
    let place = (random.signed() + 1.0) / 2.0 * of.len() as f64;
    of[(place as usize).min(of.len() - 1)].clone()
}

impl fmt::Display for Drawn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Drawn { number, tokens, .. } = self;
        let capacity = self
            .capacity
            .map_or("dropless".to_string(), |c| format!("capacity {c}"));
        write!(
            f,
            "{number:>2}: {tokens:>3} tokens, {} x {}, E {} K {}, ep {} x {}, {capacity}, {}, {}",
            self.model_dim,
            self.hidden_dim,
            self.experts,
            self.top_k,
            self.mesh.ep,
            self.mesh.expert_tp,
            self.comm_dtype,
            self.skew
        )
    }
}
