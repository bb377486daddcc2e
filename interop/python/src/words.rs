//! Errors behind the extension, in words that a Python caller can act on. Those that name a Rust
//! type, method or feature, or an option of the command line, have other texts here.

use moesaic::mesh::StrategyError;
use moesaic::{DeviceError, PlanError, UnavailableReason};
use moesaic::{EngineError, InputReason};

/// Returns the text of an error of an engine.
pub fn of_engine(error: &EngineError) -> String {
    engine(error).unwrap_or_else(|| error.to_string())
}

/// Returns the text of an error of a device.
pub fn of_device(error: &DeviceError) -> String {
    device(error).unwrap_or_else(|| error.to_string())
}

fn engine(error: &EngineError) -> Option<String> {
    use EngineError as E;
    Some(match error {
        E::Device(error) => return device(error),
        E::Plan(PlanError::Strategy(StrategyError::Packed { strategy })) => format!(
            "strategy `{strategy}` has ranks gather each other's weights, and those of a layer \
             for inference are packed for the CPU: leave out `r` and `shadows`"
        ),
        E::Input { name, reason } => return input(name, reason),
        E::NotTraining => {
            "the layer is one for inference: make an MoE of the spec to train".to_string()
        }
        E::TrainingOutput { name } => format!(
            "`{name}` is what training computes, and the layer one for inference: an MoE in \
             training mode has it"
        ),
        E::Frozen { name } => format!(
            "`{name}` has no gradient: experts of `precision.experts` are codes, which cannot be \
             trained: make a PackedLayer of the spec, or leave the key out"
        ),
        E::NoWeight { name } => format!("weight `{name}` is missing"),
        E::ForeignSaved => "backward is of another layer than its forward pass".to_string(),
        E::OverRanks { asked } => {
            format!("the layer is one over ranks, {asked} is for one process: leave out `group`")
        }
        E::NotOverRanks { asked } => {
            format!("the layer is of one process, {asked} is for ranks: give it a `group`")
        }
        _ => return None,
    })
}

fn input(name: &str, reason: &InputReason) -> Option<String> {
    let problem = match reason {
        InputReason::NotBesideSlice => "is missing: the layer reads it beside `x`",
        InputReason::OnDevice | InputReason::RoutedTogether => {
            "is on a GPU, and this layer takes tensors of the CPU"
        }
        InputReason::WeightOverRanks | InputReason::GradientOverRanks => {
            "stays in the layer's memory, whose ranks share it: leave it out"
        }
        _ => return None,
    };
    Some(format!("input `{name}` {problem}"))
}

fn device(error: &DeviceError) -> Option<String> {
    let DeviceError::Unavailable { reason, .. } = error else {
        return None;
    };
    let UnavailableReason::NotBuilt { feature } = reason else {
        return None;
    };
    Some(format!(
        "this wheel of moesaic runs no layer on {feature}: make one by `maturin build --features \
         {feature}`"
    ))
}
