//! Published gains that can only be compared in size, because too little is known about the runs.

use super::layers::Layer;
use super::{Check, ValidationReport};
use crate::{Machine, ReadError, published};
use moesaic_kernel::DType;
use moesaic_plan::AllToAll;

pub(super) fn run(report: &mut ValidationReport) -> Result<(), ReadError> {
    fastermoe(report)?;
    comet(report)
}

/// 16 V100 on two nodes with one 100 Gb/s NIC each. Assumed layer: width 1024, hidden 4096, 8192
/// tokens, top-2.
fn v100() -> Result<Machine, ReadError> {
    let mut machine = published("ndm-a100-v4")?;
    machine.levels[0].bandwidth_gbs = 120.0;
    let network = &mut machine.levels[1];
    (network.bandwidth_gbs, network.shared) = (12.0, 8);
    network.fanout = crate::Fanout::default();
    let compute = &mut machine.compute;
    (compute.memory_gbs, compute.multiprocessors) = (720.0, 80);
    compute.gemm_tflops = [("f32".to_string(), 12.0)].into();
    Ok(machine)
}

fn fastermoe(report: &mut ValidationReport) -> Result<(), ReadError> {
    let machine = v100()?;
    let layer = Layer {
        ranks: 16,
        tokens: 8192.0,
        top_k: 2.0,
        width: 1024.0,
        hidden: 4096.0,
        experts: 1.0,
        element: 4.0,
        dtype: DType::F32,
    };
    let step = |overlap_degree| {
        layer.pass(&machine, AllToAll::Linear, overlap_degree, 1.0)
            + layer.pass(&machine, AllToAll::Linear, overlap_degree, 2.0)
    };
    // Its groups are the two nodes.
    let gain = step(1) / step(2);
    report.checks.push(Check::new(
        "FasterMoE's schedule on 16 V100: 1.40 times as fast, within 25 %",
        (gain / 1.40 - 1.0).abs() <= 0.25,
        format!("{gain:.2} with assumed sizes"),
    ));
    Ok(())
}

/// Returns the fraction of the exchanges that GEMMs hide.
fn hidden(layer: &Layer, machine: &Machine, overlap_degree: usize) -> f64 {
    let apart = layer.pass(machine, AllToAll::Linear, 1, 1.0);
    let exchanges = 2.0 * layer.exchange(machine, AllToAll::Linear, 1);
    let together = layer.pass(machine, AllToAll::Linear, overlap_degree, 1.0);
    (apart - together) / exchanges
}

/// The layer of Mixtral 8x7B, one of the measured models, on one node; 8192 tokens are assumed.
fn comet(report: &mut ValidationReport) -> Result<(), ReadError> {
    let machine = published("h800")?;
    let layer = Layer {
        ranks: 8,
        tokens: 8192.0,
        top_k: 2.0,
        width: 4096.0,
        hidden: 14336.0,
        experts: 1.0,
        element: 2.0,
        dtype: DType::Bf16,
    };
    let parts = [2, 4, 8].map(|overlap_degree| hidden(&layer, &machine, overlap_degree));
    let best = parts.into_iter().fold(0.0, f64::max);
    report.checks.push(Check::new(
        "Comet on 8 H800: chunks hide 68.6 % of exchanges in Tutel, within 25 %",
        (best / 0.686 - 1.0).abs() <= 0.25,
        format!(
            "{:.0?} % with 2, 4, 8 chunks",
            parts.map(|part| 100.0 * part)
        ),
    ));
    Ok(())
}
