//! An inspection as JSON, for scripts.

use super::counted::Counted;
use super::model::{InspectedKernel, InspectedLaunch, Inspection, LaunchSize};
use crate::machine::MachineLimits;
use moesaic::plan::Step;
use serde_json::{Value, json};

/// Returns the inspection as one JSON document.
pub fn render(inspection: &Inspection, asm: Option<&[String]>) -> Value {
    let kernels = inspection.kernels.iter().enumerate();
    let kernels: Vec<Value> = kernels
        .map(|(i, kernel)| one_kernel(kernel, asm.and_then(|asm| asm.get(i))))
        .collect();
    let launches: Vec<Value> = inspection
        .launches
        .iter()
        .map(|launch| one_launch(inspection, launch))
        .collect();
    json!({
        "layer": inspection.plan.spec.name,
        "target": inspection.target.to_string(),
        "spec": inspection.plan.spec.to_toml(),
        "machine": inspection.machine.as_ref().map(machine),
        "trouble": inspection.trouble,
        "tuned": inspection.tuned,
        "tensors": tensors(inspection),
        "kernels": kernels,
        "launches": launches,
        "evaluation": evaluation(inspection),
        "counted": inspection.counted.as_ref().map(Counted::json),
    })
}

/// Lists the launches of an evaluation by a layer that trains.
fn evaluation(inspection: &Inspection) -> Vec<Value> {
    let plan = &inspection.plan;
    let one = |step: &Step| {
        let Step::Launch(launch) = step;
        let kernel = &plan.kernels[launch.entry.kernel].name;
        json!({ "kernel": kernel, "symbol": plan.symbol(step) })
    };
    plan.evaluation.iter().map(one).collect()
}

fn tensors(inspection: &Inspection) -> Vec<Value> {
    let one = |tensor: &moesaic::plan::TensorPlan| {
        let shape: Vec<String> = tensor.shape.iter().map(ToString::to_string).collect();
        json!({ "name": tensor.name, "dtype": tensor.dtype.name(), "shape": shape, "role": super::text::role_name(tensor.role) })
    };
    inspection.plan.tensors.iter().map(one).collect()
}

/// Returns a machine's limits as JSON.
pub fn machine(machine: &MachineLimits) -> Value {
    json!({
        "name": machine.name,
        "origin": machine.origin.name(),
        "f32_flops": machine.f32_flops,
        "f16_flops": machine.f16_flops,
        "bf16_flops": machine.bf16_flops,
        "bytes_per_second": machine.bytes_per_second(),
        "levels": machine.levels.iter().map(|level| json!({
            "name": level.name,
            "capacity": level.capacity,
            "bytes_per_second": level.bytes_per_second,
        })).collect::<Vec<_>>(),
        "launch_seconds": machine.launch_seconds,
    })
}

fn one_kernel(kernel: &InspectedKernel, asm: Option<&String>) -> Value {
    let report = kernel.artifact.as_ref().map(|artifact| &artifact.report);
    let bytes = kernel
        .artifact
        .as_ref()
        .map(|artifact| artifact.binary.len());
    json!({
        "name": kernel.source.name,
        "tokens": kernel.tokens,
        "stem": kernel.source.stem.name(),
        "file": kernel.source.file_name(),
        "source": kernel.source.text,
        "cached": kernel.cached,
        "bytes": bytes,
        "report": report.and_then(|report| serde_json::to_value(report).ok()),
        "problem": kernel.problem,
        "asm": asm,
    })
}

fn one_launch(inspection: &Inspection, launch: &InspectedLaunch) -> Value {
    let entry = inspection.entry(launch);
    let [x, y] = entry.launch.grid.each_ref().map(ToString::to_string);
    json!({
        "number": launch.number,
        "kernel": inspection.kernels[launch.kernel].source.name,
        "symbol": entry.symbol,
        "summary": entry.summary,
        "reads": inspection.reads(launch),
        "writes": inspection.writes(launch),
        "grid": [x, y],
        "threads": entry.launch.threads,
        "shared_bytes": entry.launch.shared_bytes,
        "at": launch.at.iter().map(|at| one_point(inspection, at)).collect::<Vec<_>>(),
    })
}

fn one_point(inspection: &Inspection, at: &LaunchSize) -> Value {
    let machine = inspection.machine.as_ref();
    json!({
        "tokens": at.tokens,
        "grid": at.grid,
        "flops": at.work.flops,
        "bytes": at.work.bytes,
        "roofline_seconds": at.roofline.map(|roofline| roofline.seconds),
        "bound_by": at.roofline.map(|_| super::text::bound(at, machine)),
    })
}
