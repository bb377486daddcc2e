//! The layer for inference, against the engine's own calls.

use crate::in_candle::{Case, random, tensors};
use candle_core::{D, DType, Device, Module, Result, Tensor};
use candle_nn::VarBuilder;
use moesaic::spec::canonical_tensors;
use moesaic::{Engine, Input, LayerSpec, Tensor as HostTensor, Tensors};
use moesaic_candle::{InferenceLayer, Inputs, Names};
use std::collections::HashMap;

const SPEC: &str = r#"
shape = { model_dim = 24, hidden_dim = 20, experts = 5, top_k = 2 }
router = { renormalize = "sum" }

[[shared]]
hidden_dim = 12
gate = "sigmoid"
"#;

fn engine() -> Engine {
    Engine::cpu().expect("a C compiler")
}

/// The weights of a case as the engine takes them.
fn hosts(case: &Case) -> Result<Tensors<'static>> {
    let mut weights = Tensors::new();
    for tensor in canonical_tensors(&case.spec) {
        let values = case.vars[&tensor.name].flatten_all()?;
        let values = values.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        let rounded = HostTensor::rounded(tensor.dtype, &tensor.shape, &values);
        weights.insert(&tensor.name, rounded.into_static());
    }
    Ok(weights)
}

#[test]
fn a_module_gives_what_the_engine_gives_to_the_bit() -> Result<()> {
    for (name, dtype) in [
        ("f32", DType::F32),
        ("bf16", DType::BF16),
        ("f16", DType::F16),
    ] {
        let precision = format!("precision = {{ weights = \"{name}\", activations = \"{name}\" }}");
        let case = Case::new(&format!("{precision}\n{SPEC}"))?;
        let layer = InferenceLayer::new(&engine(), &case.spec, &tensors(&case.vars))?;
        let whole = engine().layer(&case.spec, &hosts(&case)?).expect("a layer");
        let x = random(&[2, 3, 24], 1.0, &mut 9)?.to_dtype(dtype)?;
        let y = layer.forward(&x)?;
        assert_eq!(y.dims(), [2, 3, 24]);
        assert!(!y.track_op());
        let values = x.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        let mut input = Input {
            tokens: 6,
            ..Input::default()
        };
        let precision = case.spec.precision.activations;
        input.insert("x", HostTensor::rounded(precision, &[6, 24], &values));
        let expected = whole.forward(&input).expect("it runs").y().to_f32();
        let found = y.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        assert_eq!(found, expected, "{name}");
        let with = layer.forward_with(&Inputs::new(&x))?;
        assert_eq!(with.dims(), [2, 3, 24]);
        let with = with.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        assert_eq!(with, expected, "{name}");
    }
    Ok(())
}

#[test]
fn tokens_may_lie_anyhow() -> Result<()> {
    let case = Case::new(SPEC)?;
    let layer = InferenceLayer::new(&engine(), &case.spec, &tensors(&case.vars))?;
    let x = random(&[7, 24], 1.0, &mut 9)?;
    let y = layer.forward(&x)?.to_vec2::<f32>()?;
    let across = x.t()?.contiguous()?.t()?;
    assert!(!across.is_contiguous());
    assert_eq!(layer.forward(&across)?.to_vec2::<f32>()?, y);
    let part = x.narrow(0, 2, 3)?;
    assert_eq!(layer.forward(&part)?.to_vec2::<f32>()?, y[2..5]);
    assert_eq!(layer.forward(&x.narrow(0, 0, 0)?)?.dims(), [0, 24]);
    Ok(())
}

/// Weights by the names of a Qwen2-MoE block, through a `VarBuilder`.
#[test]
fn a_var_builder_has_the_weights() -> Result<()> {
    let case = Case::new(SPEC)?;
    let mut named = HashMap::new();
    for (name, var) in &case.vars {
        let tensor = var.as_tensor().clone();
        let name = match name.strip_prefix("experts.") {
            Some(matrix) => {
                let part = matrix.trim_end_matches(".weight");
                for expert in 0..5 {
                    let name = format!("mlp.experts.{expert}.{part}_proj.weight");
                    named.insert(name, tensor.get(expert)?);
                }
                continue;
            }
            None if name == "router.weight" => "mlp.gate.weight".to_string(),
            None if name == "shared.0.router.weight" => "mlp.shared_expert_gate.weight".to_string(),
            None => {
                let part = name.trim_start_matches("shared.0.");
                let part = part.trim_end_matches(".weight");
                format!("mlp.shared_expert.{part}_proj.weight")
            }
        };
        named.insert(name, tensor);
    }
    let vb = VarBuilder::from_tensors(named, DType::F32, &Device::Cpu).pp("mlp");
    let get = |shape: &[usize], name: &str| vb.get(shape, name);
    let layer = InferenceLayer::load(&engine(), &case.spec, Names::Qwen, get)?;
    let x = random(&[7, 24], 1.0, &mut 9)?;
    let expected = InferenceLayer::new(&engine(), &case.spec, &tensors(&case.vars))?;
    let difference = (layer.forward(&x)? - expected.forward(&x)?)?;
    assert_eq!(difference.abs()?.max_all()?.to_scalar::<f32>()?, 0.0);

    let error = InferenceLayer::load(&engine(), &case.spec, Names::Mixtral, get).unwrap_err();
    let text = error.to_string();
    for part in [
        "no name for `shared.0.",
        "`shared.0.gate.weight`",
        "`shared.0.down.weight`",
    ] {
        assert!(text.contains(part), "{text}");
    }
    let short = LayerSpec::from_toml(&SPEC.replace("experts = 5", "experts = 6")).expect("valid");
    let error = InferenceLayer::load(&engine(), &short, Names::Qwen, get).unwrap_err();
    let text = error.to_string();
    for part in [
        "weights are missing or do not fit:\n",
        "\n  `gate.weight`: ",
        ", expected [6, 24]",
        "\n  `experts.5.up_proj.weight`: ",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("shared_expert"), "{text}");
    Ok(())
}

/// Every weight that is missing or misshapen is named, with the shape that it should have.
#[test]
fn all_that_is_missing_is_in_one_error() -> Result<()> {
    let case = Case::new(SPEC)?;
    let mut weights = tensors(&case.vars);
    let shared = weights.remove("shared.0.up.weight").expect("it has one");
    let error = InferenceLayer::new(&engine(), &case.spec, &weights).unwrap_err();
    let one = "`shared.0.up.weight`: is missing, expected [12, 24]";
    assert_eq!(error.to_string(), one);
    weights.remove("router.weight");
    weights.insert("shared.0.down.weight".to_string(), shared);
    let error = InferenceLayer::new(&engine(), &case.spec, &weights).unwrap_err();
    let all = "weights are missing or do not fit:\n  \
               `router.weight`: is missing, expected [5, 24]\n  \
               `shared.0.down.weight`: has shape [12, 24], expected [24, 12]\n  \
               `shared.0.up.weight`: is missing, expected [12, 24]";
    assert_eq!(error.to_string(), all);

    let get = |shape: &[usize], name: &str| match name {
        "gate.weight" | "experts.1.up_proj.weight" => candle_core::bail!("is not here"),
        _ if name.contains("down_proj") => candle_core::bail!("is not here"),
        _ => Tensor::zeros(shape, DType::F32, &Device::Cpu),
    };
    let error = InferenceLayer::load(&engine(), &case.spec, Names::Qwen, get).unwrap_err();
    let all = "weights are missing or do not fit:\n  \
               `experts.0.down_proj.weight`: is not here, expected [24, 20]; \
               experts 1-4 fail, too\n  \
               `experts.1.up_proj.weight`: is not here, expected [20, 24]\n  \
               `gate.weight`: is not here, expected [5, 24]\n  \
               `shared_expert.down_proj.weight`: is not here, expected [24, 12]";
    assert_eq!(error.to_string(), all);
    Ok(())
}

#[test]
fn clones_share_weights_and_run_in_threads() -> Result<()> {
    let case = Case::new(SPEC)?;
    let layer = InferenceLayer::new(&engine(), &case.spec, &tensors(&case.vars))?;
    let x = random(&[7, 24], 1.0, &mut 9)?;
    let y = layer.forward(&x)?.to_vec2::<f32>()?;
    assert!(format!("{layer:?}").contains("model_dim: 24"), "{layer:?}");
    std::thread::scope(|scope| {
        for clone in [layer.clone(), layer.clone(), layer.clone()] {
            let (x, y) = (&x, &y);
            scope.spawn(move || {
                for _ in 0..5 {
                    let found = clone.forward(x).and_then(|found| found.to_vec2::<f32>());
                    assert_eq!(&found.expect("it runs"), y);
                }
            });
        }
    });
    Ok(())
}

#[test]
fn tokens_that_do_not_fit_are_refused() -> Result<()> {
    let case = Case::new(SPEC)?;
    let layer = InferenceLayer::new(&engine(), &case.spec, &tensors(&case.vars))?;
    let x = random(&[7, 24], 1.0, &mut 9)?;
    let said = |x: &Tensor| layer.forward(x).unwrap_err().to_string();
    let text = said(&x.to_dtype(DType::F16)?);
    assert!(
        text.contains("`x` is F16, the layer computes in F32"),
        "{text}"
    );
    let text = said(&x.narrow(D::Minus1, 0, 8)?);
    assert!(text.contains("[7, 8], the layer takes [.., 24]"), "{text}");
    Ok(())
}
