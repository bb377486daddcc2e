//! Layers as other libraries run them: two exchanges and two GEMMs, in chunks.

use super::even_in;
use crate::schedule::{Chunk, pipeline};
use crate::{Machine, PhaseTime};
use moesaic_kernel::DType;
use moesaic_plan::AllToAll;

/// A layer of a library with equally many slots for every expert, in f32.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layer {
    pub ranks: usize,
    pub tokens: f64,
    pub top_k: f64,
    pub width: f64,
    pub hidden: f64,
    /// The experts of a rank; below one where several ranks share an expert.
    pub experts: f64,
    /// The bytes of an element.
    pub element: f64,
    pub dtype: DType,
}

/// The rows and columns of a tile of a library's GEMMs.
const TILE: f64 = 128.0;

impl Layer {
    fn rows(&self) -> f64 {
        self.tokens * self.top_k
    }

    /// Returns the bytes that a rank sends in one exchange.
    pub fn bytes(&self) -> f64 {
        self.rows() * self.width * self.element
    }

    /// Returns the seconds of one exchange of a chunk with 1 / `overlap_degree` of the rows.
    /// Chunks are sent from where their rows lie, with a message for each expert.
    pub fn exchange(&self, machine: &Machine, all_to_all: AllToAll, overlap_degree: usize) -> f64 {
        self.time(machine, all_to_all, overlap_degree).seconds
    }

    fn time(&self, machine: &Machine, all_to_all: AllToAll, overlap_degree: usize) -> PhaseTime {
        let chunks = match overlap_degree {
            1 => 1.0,
            _ => self.experts.max(1.0),
        };
        let bytes = self.bytes() / overlap_degree as f64;
        even_in(machine, self.ranks, bytes, all_to_all, chunks).time
    }

    /// Returns the seconds of both GEMMs of such a chunk, with `batch` rows of an expert in one
    /// GEMM.
    pub fn products(
        &self,
        machine: &Machine,
        overlap_degree: usize,
        batch: f64,
        processors: f64,
    ) -> f64 {
        let rows = self.rows() / overlap_degree as f64;
        let batch = batch.min(rows / self.experts.max(1.0)).max(1.0);
        // Libraries pick smaller tiles for small batches, in powers of two.
        let tile = TILE.min(batch.log2().ceil().exp2().max(16.0));
        let all = machine.compute.multiprocessors as f64;
        let rate = machine.gemm_rate(self.dtype) / all;
        let product = |inner: f64, outer: f64| {
            let row_tiles = rows / batch * (batch / tile).ceil();
            let tiles = row_tiles * (outer / TILE).ceil();
            let flops = 2.0 * row_tiles * tile * inner * outer;
            let waves = (tiles / processors).ceil();
            machine.launch() + waves * flops / tiles / rate
        };
        product(self.width, self.hidden) + product(self.hidden, self.width)
    }

    /// Returns the seconds of a pass whose GEMMs take `times` those of forward.
    pub fn pass(
        &self,
        machine: &Machine,
        all_to_all: AllToAll,
        overlap_degree: usize,
        times: f64,
    ) -> f64 {
        let all = machine.compute.multiprocessors as f64;
        let left = all - machine.overlap.multiprocessors as f64;
        let product = self.products(machine, overlap_degree, f64::INFINITY, all) * times;
        let fewer = self.products(machine, overlap_degree, f64::INFINITY, left) * times;
        let exchange = self.time(machine, all_to_all, overlap_degree);
        let slowed = product * (1.0 + machine.overlap.compute_slowdown);
        let chunk = Chunk {
            there: exchange.seconds,
            product,
            hindered: fewer.max(slowed) + 2.0 * exchange.copies,
            back: exchange.seconds,
            // Nothing of one exchange is assumed to hide behind another, because no publication
            // says how much does.
            skipped: [0.0; 2],
            overlapped: 0.0,
        };
        let slowdown = machine.overlap.transfer_slowdown;
        let lines = pipeline(
            (&[0.0], &[0.0]),
            &[0],
            &[vec![chunk; overlap_degree]],
            slowdown,
        );
        lines[0].end() + self.around(machine)
    }

    /// Returns the seconds of dispatch and combine, which each read and write rows once.
    pub fn around(&self, machine: &Machine) -> f64 {
        4.0 * self.bytes() / machine.memory_rate() + 4.0 * machine.launch()
    }
}
