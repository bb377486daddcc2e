//! The decode kernels on the PTX interpreter and on fibers, against the reference, and
//! what they read and write.

use crate::gemm_amd::{self, MFMA};
use moesaic_harness::Harness;
use moesaic_harness::gemm::Gemms;
use moesaic_harness::plans::only;
use moesaic_harness::rows::{Rows, Spread};
use moesaic_harness::specs::{layer, with};
use moesaic_harness::thorough::in_turns;
use moesaic_kernel::DType::{self, Bf16, F16, F32};
use moesaic_plan::PlanOptions;
use moesaic_spec::*;
use moesaic_target::KernelCounters;
use std::collections::BTreeSet;

/// The GEMMs of a layer on a simulated A100, each in two kernels.
fn gemms(spec: &LayerSpec) -> Gemms {
    cuda(spec, "sim:sm_80")
}

fn cuda(spec: &LayerSpec, target: &str) -> Gemms {
    let options = PlanOptions::default();
    let gemms = Gemms::planned(spec, target, &options, Harness::of);
    let pairs = gemms.harness.families();
    let decode = pairs
        .chunks(2)
        .all(|pair| pair[0] == "mma_decode" && ["mma", "wgmma"].contains(&pair[1]));
    assert!(decode, "{pairs:?} of {spec:?}");
    gemms
}

/// Widths of whole chunks of 16 bytes and of parts; columns with a tail; counts below, at
/// and above each height, and more than one tile of one expert.
#[test]
fn widths_and_heights() {
    let cases = [
        ([8, 16, 24], [1, 1], Bf16),
        ([40, 70, 72], [3, 3], F16),
        ([200, 266, 10], [60, 1], Bf16),
        ([66, 38, 6], [7, 2], F16),
        ([65, 41, 7], [3, 2], F32),
        ([264, 40, 264], [8, 8], F32),
        // More experts than a warp compares a tile with at once.
        ([16, 8, 8], [300, 2], Bf16),
    ];
    for (shape, experts, dtype) in cases {
        let gemms = gemms(&layer(shape, experts, dtype));
        for tokens in [0, 1, 9, 33, 64, 70] {
            gemms.check_call(tokens, Spread::Random);
        }
        for tokens in [8, 16, 17, 32, 63, 64] {
            gemms.check_call(tokens, Spread::One);
        }
    }
}

#[test]
fn epilogues_are_the_reference_s() {
    for (i, dtype) in [Bf16, F16, F32, Bf16].into_iter().enumerate() {
        let mut spec = layer([72, 42, 66], [[3, 2], [40, 1]][i % 2], dtype);
        spec.experts.activation =
            [Activation::Silu, Activation::Gelu, Activation::Relu2][i % 3].clone();
        spec.experts.form = [ExpertForm::Gated, ExpertForm::Plain][i / 2 % 2];
        spec.experts.bias = (i != 1).into();
        spec.router.weight_on = [
            WeightSite::Activation,
            WeightSite::Output,
            WeightSite::Input,
        ][i % 3];
        if i < 2 {
            spec.experts.clamp = Some(0.4);
            spec.experts.up_offset = 1.0;
        }
        gemms(&spec).check_call(33, Spread::Random);
    }
}

/// A row has the same bits wherever it lies among the rows of its expert.
#[test]
fn rows_lie_anywhere() {
    for (experts, dtype) in [([8, 2], Bf16), ([60, 1], F16), ([8, 2], F32)] {
        let spec = layer([72, 40, 72], experts, dtype);
        let gemms = gemms(&spec);
        gemms.check_anywhere(60);
    }
}

/// The decode kernels of a layer alone, on a simulated AMD GPU.
fn amd(spec: &LayerSpec, target: &str) -> Gemms {
    let decode_only = |plan| only(plan, |kernel| kernel.family() == Some("mfma_decode"));
    let gemms = Gemms::planned(spec, target, &PlanOptions::default(), |plan| {
        Harness::of(decode_only(plan))
    });
    let families = gemms.harness.families();
    assert!(families.len() >= 2, "{families:?} for {target}");
    gemms
}

fn run_amd(spec: &LayerSpec, target: &str, calls: &[(usize, Spread)]) {
    let gemms = amd(spec, target);
    for &(tokens, spread) in calls {
        gemms.check_call(tokens, spread);
    }
}

/// Widths that nothing divides; experts and top-k for both GEMMs; counts below, at and
/// above each height, and of [7, 2] more rows of one expert than fit one turn.
#[test]
fn amd_widths_and_heights() {
    let cases = [
        ([8, 16, 24], [1, 1]),
        ([40, 70, 72], [60, 1]),
        ([65, 41, 7], [7, 2]),
        ([264, 63, 10], [60, 1]),
        ([66, 38, 65], [7, 2]),
        // More experts than a wave compares a tile with at once.
        ([16, 8, 8], [600, 2]),
    ];
    let calls = [0, 1, 8, 30, 64].map(|tokens| (tokens, Spread::Random));
    let one = [1, 16, 17, 32, 33, 64].map(|tokens| (tokens, Spread::One));
    let calls = [&calls[..], &one[..]].concat();
    for (i, target) in MFMA.into_iter().enumerate() {
        for (j, dtype) in [Bf16, F16, F32].into_iter().enumerate() {
            let (shape, experts) = cases[(3 * i + j) % 5];
            let spec = with(layer(shape, experts, dtype), |s| {
                s.experts.form = form(i + j)
            });
            run_amd(&spec, target, &calls);
        }
        let (shape, experts) = cases[5];
        run_amd(
            &layer(shape, experts, Bf16),
            target,
            &[(33, Spread::Random)],
        );
    }
}

fn form(case: usize) -> ExpertForm {
    [ExpertForm::Gated, ExpertForm::Plain][case % 2]
}

#[test]
fn amd_epilogues_are_the_reference_s() {
    for (spec, target) in gemm_amd::epilogues().iter().zip(MFMA.iter().cycle()) {
        run_amd(spec, target, &[(33, Spread::Random)]);
    }
}

/// A row has the same bits wherever it lies among the rows of its expert.
#[test]
fn amd_rows_lie_anywhere() {
    for (target, dtype) in MFMA.into_iter().zip([Bf16, F32, F16]) {
        for experts in [[8, 2], [60, 1]] {
            let spec = layer([72, 40, 72], experts, dtype);
            amd(&spec, target).check_anywhere(60);
        }
    }
}

const TYPES: [DType; 3] = [Bf16, F16, F32];
const COUNTS: [usize; 4] = [1, 8, 30, 64];

/// Widths of whole chunks.
fn whole(experts: usize, dtype: DType, form: ExpertForm) -> LayerSpec {
    let spec = layer([256, 96, 160], [experts, 1], dtype);
    with(spec, |s| s.experts.form = form)
}

/// Weights are read once, whatever the height, and rows once for 16 lines of weights; requests
/// are 16 bytes wide, and no banks conflict.
#[test]
fn weights_are_read_once() {
    // A line of 128 bytes is copied by eight lanes.
    let reader = Reader {
        threads: 32,
        lines: 16,
        slots: Slots::OfRow(8),
    };
    for (i, dtype) in TYPES.into_iter().enumerate() {
        let cases = [(2, form(i)), (8, form(i + 1))];
        for (j, (experts, form)) in cases.into_iter().enumerate() {
            for target in in_turns(i + j, ["sim:sm_80", "sim:sm_90a"]) {
                let gemms = cuda(&whole(experts, dtype, form), target);
                for tokens in COUNTS {
                    reader.check(&gemms, tokens, &check_requests);
                }
            }
        }
    }
}

/// The same of AMD's waves, with both instructions: one of 32 lines and rows and one of 16. Fibers
/// see bytes, but of lanes that only read along.
#[test]
fn amd_weights_are_read_once() {
    for (n, target) in MFMA.into_iter().enumerate() {
        for (i, dtype) in TYPES.into_iter().enumerate() {
            let cases = [(4, 32, form(i)), (64, 16, form(i + 1))];
            for (experts, edge, form) in in_turns(n + i, cases) {
                let gemms = amd(&whole(experts, dtype, form), target);
                // Every lane takes the rows of its place in each `edge` of 64.
                let reader = Reader {
                    threads: 64,
                    lines: edge,
                    slots: Slots::OfTile(64 * 64 / edge),
                };
                for tokens in COUNTS {
                    reader.check(&gemms, tokens, &|_, _| ());
                }
            }
        }
    }
}

/// Weights and rows, so many bytes, are asked for 16 bytes at a time; no lanes meet in a bank.
fn check_requests(counters: &KernelCounters, bytes: u64) {
    let wide = counters.global_widths[4] * 16 * 32;
    assert!(wide >= bytes, "{bytes} bytes: {counters:?}");
    assert_eq!(counters.shared.bank_conflicts(), 0, "{counters:?}");
}

/// The properties of a block: threads, lines of weights, and loads of slots.
struct Reader {
    threads: u64,
    lines: u64,
    slots: Slots,
}

/// The loads of a row's slot by a block.
enum Slots {
    /// For each of its rows.
    OfRow(u64),
    /// Whatever its rows.
    OfTile(u64),
}

/// The operands of a GEMM: rows of `inner` elements by as many of `lines` of each expert's weights,
/// a `tile` of them by each block.
struct Product<'a> {
    spec: &'a LayerSpec,
    rows: &'a Rows,
    inner: u64,
    lines: u64,
    tile: u64,
    gathers: bool,
}

impl Reader {
    /// Runs both GEMMs, for rows of one expert and of several, and holds what they read and
    /// write to what there is, to the byte. `also` is shown the bytes of weights and rows.
    fn check(&self, gemms: &Gemms, tokens: usize, also: &dyn Fn(&KernelCounters, u64)) {
        let spec = &gemms.harness.plan.spec;
        for spread in [Spread::One, Spread::Random] {
            gemms.check_call(tokens, spread);
            let rows = Rows::new(spec, tokens, spread);
            let launched = gemms.harness.take_counters();
            assert_eq!(launched.len(), 2, "kernels of many are not launched");
            for (counters, (product, columns)) in
                launched.iter().zip(products(spec, &rows, self.lines))
            {
                let target = gemms.harness.plan.target;
                let what = format!("{target}, {tokens} tokens {spread:?}, {spec:?}");
                let read = product.factors() + self.indices(&product, counters.blocks);
                assert_eq!(counters.global_loads.bytes, read, "read, {what}");
                let written = rows.count() as u64 * columns * size(spec);
                assert_eq!(counters.global_stores.bytes, written, "written, {what}");
                also(counters, product.factors());
            }
        }
    }

    /// Bytes read to find out which rows and weights a block has, in a grid of so many blocks.
    fn indices(&self, product: &Product<'_>, grid: u64) -> u64 {
        // Every thread reads the number of row tiles, and the first tiles of its share of the
        // experts: a word each. One that has a tile takes its expert's first tile, and where its
        // rows begin and end, 8 bytes each.
        let share = (product.spec.shape.experts as u64).div_ceil(self.threads);
        let with_tile = product.experts() * product.column_tiles();
        let found = self.threads * (4 * (1 + share) * grid + (4 + 2 * 8) * with_tile);
        // A lane that asks for a row that is gathered reads for itself which slot it is of.
        let slots = match self.slots {
            Slots::OfRow(times) => 4 * times * product.count() * product.column_tiles(),
            Slots::OfTile(times) => 4 * times * with_tile,
        };
        found + if product.gathers { slots } else { 0 }
    }
}

impl Product<'_> {
    /// Bytes of weights, each once, and of rows, each once for a column tile.
    fn factors(&self) -> u64 {
        let lines = self.experts() * self.lines + self.column_tiles() * self.count();
        lines * self.inner * size(self.spec)
    }

    fn column_tiles(&self) -> u64 {
        self.lines / self.tile
    }

    fn count(&self) -> u64 {
        self.rows.count() as u64
    }

    /// Returns the experts with rows. Up to 64 rows of an expert are one row tile.
    fn experts(&self) -> u64 {
        let experts: BTreeSet<usize> = self.rows.list.iter().map(|row| row.0).collect();
        experts.len() as u64
    }
}

/// Both GEMMs of a layer, and the columns of their results.
fn products<'a>(spec: &'a LayerSpec, rows: &'a Rows, tile: u64) -> [(Product<'a>, u64); 2] {
    let shape = &spec.shape;
    let [d, h, out] = [shape.model_dim, shape.hidden_dim, spec.output_dim()].map(|n| n as u64);
    let matrices = match spec.experts.form {
        ExpertForm::Gated => 2,
        ExpertForm::Plain => 1,
    };
    let product = |inner, lines, gathers| Product {
        spec,
        rows,
        inner,
        lines,
        tile,
        gathers,
    };
    [
        (product(d, matrices * h, true), h),
        (product(h, out, false), out),
    ]
}

fn size(spec: &LayerSpec) -> u64 {
    spec.precision.weights.size() as u64
}
