//! Errors behind this interface, in words that a C caller can act on. Those that name a Rust type,
//! method or feature have other texts here; all others keep their own.

use moesaic::collectives::{CollectiveError, SetupError};
use moesaic::mesh::StrategyError;
use moesaic::{CompileError, DeviceError, PlanError, UnavailableReason};
use moesaic::{EngineError, InputReason, OpenError, WeightReason};

/// Returns the text of an error.
pub(crate) fn of(error: &moesaic::Error) -> String {
    use moesaic::Error as E;
    let text = match error {
        E::Engine(error) => engine(error),
        E::Open(OpenError::Device(error)) | E::Device(error) => device(error),
        E::Open(OpenError::Compile(error)) | E::Compile(error) => compiler(error),
        E::Collective(error) => exchange(error),
        _ => None,
    };
    text.unwrap_or_else(|| error.to_string())
}

fn engine(error: &EngineError) -> Option<String> {
    use EngineError as E;
    Some(match error {
        E::Device(error) => return device(error),
        E::Compile(error) => return compiler(error),
        E::Collective(error) => return exchange(error),
        E::Plan(PlanError::Strategy(StrategyError::Packed { strategy })) => format!(
            "argument `strategy` is `{strategy}`, for which ranks gather each other's weights; \
             those of this layer are packed for the CPU: set `training` in moesaic_layer_options, \
             whose layers are not packed, or leave out `r` and `shadows`"
        ),
        E::Input { name, reason } => return input(name, reason),
        E::Weight {
            name,
            reason: WeightReason::Packed,
        } => format!(
            "weight `{name}` is packed, and not read where it lies: copy it by \
             moesaic_layer_set_weight"
        ),
        E::Weights(errors) if errors.iter().any(|error| engine(error).is_some()) => {
            let lines = errors.iter().map(|error| {
                let text = engine(error).unwrap_or_else(|| error.to_string());
                format!("\n  {text}")
            });
            let lines: String = lines.collect();
            format!("{} weights do not fit:{lines}", errors.len())
        }
        E::NoWeight { name } => {
            format!("tensor `{name}` is not bound: give it to moesaic_layer_bind")
        }
        E::TrainingOutput { name } => {
            format!("tensor `{name}` is what training computes: name it in moesaic_forward_train")
        }
        E::ForeignSaved => "argument `saved` is of another layer: give the state that \
                            moesaic_forward_train made of this one"
            .to_string(),
        E::OverRanks { asked } => format!(
            "the layer is one of a mesh, {asked} is for a layer of one process: make it with \
             `mesh` NULL in moesaic_layer_options"
        ),
        E::NotOverRanks { asked } => format!(
            "the layer is of one process, {asked} is for a layer over ranks: make it with a mesh \
             in moesaic_layer_options"
        ),
        E::Frozen { name } => format!(
            "`{name}` has no gradient: experts of `precision.experts` are codes, which cannot be \
             trained: leave the key out of the spec, and give the numbers that codes stand for"
        ),
        _ => return None,
    })
}

fn input(name: &str, reason: &InputReason) -> Option<String> {
    use InputReason as R;
    let problem = match reason {
        R::NotBesideSlice => "is missing: name it in the call",
        R::OnDevice => "is in device memory, and this layer takes host memory",
        R::RoutedTogether => {
            "is in device memory, but this mesh routes the tokens of all ranks together: give it \
             in host memory, or make the mesh with `world_scope` 0"
        }
        R::WeightOverRanks => {
            "is in the layer's memory: leave it out, and replace it by moesaic_layer_set_weight"
        }
        R::GradientOverRanks => {
            "stays in the layer's memory on a mesh, where ranks add it up: leave it out, and read \
             it by moesaic_layer_gradient"
        }
        _ => return None,
    };
    Some(format!("tensor `{name}` {problem}"))
}

fn device(error: &DeviceError) -> Option<String> {
    let DeviceError::Unavailable { backend, reason } = error else {
        return None;
    };
    let UnavailableReason::NotBuilt { feature } = reason else {
        return None;
    };
    Some(match feature.as_str() {
        "sim" => without_simulators(),
        _ => format!(
            "no `{backend}` device is available, because this library was built without it: \
             install it by `interop/c/install.sh PREFIX --features {feature}`"
        ),
    })
}

fn compiler(error: &CompileError) -> Option<String> {
    match error {
        CompileError::NoCompiler { backend, .. } if backend == "sim" => Some(without_simulators()),
        _ => None,
    }
}

fn without_simulators() -> String {
    "this library has no simulators of GPUs: take a target of \"cpu\", \"cuda\" or \"rocm\""
        .to_string()
}

fn exchange(error: &CollectiveError) -> Option<String> {
    let CollectiveError::Setup(reason) = error else {
        return None;
    };
    Some(match reason {
        SetupError::Finished => "the world was ended by moesaic_world_finish".to_string(),
        SetupError::Dropped => "the world was freed without moesaic_world_finish".to_string(),
        _ => return None,
    })
}
