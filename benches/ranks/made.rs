//! A layer as a party has it: whole, or a rank's part.

use crate::Result;
use crate::data::floats;
use crate::select::Pass;
use moesaic::plan::RankStep;
use moesaic::weights::{Checkpoint, LayerReader, LoadOptions};
use moesaic::{
    DType, Engine, Input, Layer, LayerSpec, Mesh, MeshLayer, Output, RngKey, Tensor, Training,
};
use rayon::prelude::*;
use std::path::Path;

pub enum Made {
    Alone(Box<Layer>),
    Shared(Box<MeshLayer>),
}

/// A rank's tokens.
#[derive(Default)]
pub struct Call {
    pub tokens: usize,
    pub x: Vec<u8>,
    pub dy: Vec<u8>,
}

/// Results by name, as bytes.
pub type Named = Vec<(String, Vec<u8>)>;

impl Made {
    /// Reads the layer of a folder, a rank its own experts alone.
    pub fn load(
        engine: &Engine,
        mesh: Option<&Mesh>,
        folder: &Path,
        spec: &LayerSpec,
        pass: Pass,
    ) -> Result<Made> {
        let file = Checkpoint::open(folder.join("weights.safetensors"))?;
        let weights = LayerReader::canonical(spec, &file, LoadOptions::default())?;
        let training = (pass == Pass::Both).then(Training::default);
        Ok(match (mesh, training) {
            (Some(mesh), training) => {
                let layer = engine.mesh_layer(mesh, spec, &weights, training)?;
                Made::Shared(Box::new(layer))
            }
            (None, training) => Made::Alone(Box::new(match training {
                None => engine.layer(spec, &weights)?,
                Some(training) => engine.training_layer(spec, &weights, training)?,
            })),
        })
    }

    fn spec(&self) -> &LayerSpec {
        match self {
            Made::Alone(layer) => layer.spec(),
            Made::Shared(layer) => &layer.plan().tokens.spec,
        }
    }

    /// Launches of a call, and exchanges.
    pub fn steps(&self, pass: Pass) -> [usize; 2] {
        match self {
            Made::Alone(layer) => {
                let plan = layer.plan();
                let launches = match pass {
                    Pass::Forward => plan.evaluation_steps().len(),
                    Pass::Both => plan.steps.len() + plan.backward.len(),
                };
                [launches, 0]
            }
            Made::Shared(layer) => {
                let steps = rank_steps(layer, pass);
                let launches = |step: &&RankStep| matches!(step, RankStep::Launch { .. });
                let launches = steps.iter().filter(launches).count();
                [launches, steps.len() - launches]
            }
        }
    }

    /// Returns the bytes that, by the plan, this rank sends to others and
    /// keeps, if every expert gets equally many rows.
    pub fn planned(&self, pass: Pass, tokens: usize, ranks: usize) -> [u64; 2] {
        match self {
            Made::Alone(_) => [0, 0],
            Made::Shared(layer) => {
                let steps = rank_steps(layer, pass);
                let sent = layer.plan().bytes_of(&steps, tokens as u64, ranks);
                [sent.node, sent.here]
            }
        }
    }

    pub fn once(&self, pass: Pass, call: &Call) -> Result<Named> {
        let mut input = Input {
            tokens: call.tokens,
            ..Input::default()
        };
        input.insert("x", self.rows(call.tokens, &call.x));
        if pass == Pass::Forward {
            let output = match self {
                Made::Alone(layer) => layer.forward(&input)?,
                Made::Shared(layer) => layer.forward(&input)?,
            };
            return Ok(vec![named(output, "y")?]);
        }
        let dy = self.rows(call.tokens, &call.dy);
        let rng_key = RngKey::default();
        let (output, back) = match self {
            Made::Alone(layer) => {
                let (output, saved) = layer.forward_train(&input, &["y"], rng_key)?;
                (output, layer.backward(&saved, &dy, false)?)
            }
            Made::Shared(layer) => {
                let (output, saved) = layer.forward_train(&input, &["y"], rng_key)?;
                let back = layer.backward(&saved, &dy, false)?;
                layer.reduce_gradients()?;
                (output, back)
            }
        };
        Ok(vec![named(output, "y")?, named(back, "dx")?])
    }

    fn rows<'a>(&self, tokens: usize, data: &'a [u8]) -> Tensor<'a> {
        let spec = self.spec();
        Tensor {
            dtype: spec.precision.activations,
            shape: vec![tokens, spec.shape.model_dim],
            data: data.into(),
        }
    }

    /// Gradients of weights, each times a fixed vector along its last dimension.
    pub fn gradients(&self) -> Result<Named> {
        let parts = match self {
            Made::Alone(layer) => vec![&**layer],
            Made::Shared(layer) => layer.parts().collect(),
        };
        let mut list = Named::new();
        for layer in parts {
            for (name, tensor) in layer.gradients()? {
                let width = *tensor.shape.last().unwrap_or(&1);
                let rows = tensor.data.par_chunks(width.max(1) * 4);
                let sums: Vec<f32> = rows.map(dot).collect();
                let bytes = sums.into_iter().flat_map(f32::to_le_bytes).collect();
                list.push((format!("grad.{name}"), bytes));
            }
        }
        Ok(list)
    }
}

/// The row of a gradient times the vector that Tutel's script has, too.
fn dot(row: &[u8]) -> f32 {
    let values = floats(row, DType::F32);
    let weight = |at: usize| (at * 7919 % 1000) as f32 / 1000.0 - 0.5;
    let products = values.iter().enumerate().map(|(at, v)| v * weight(at));
    products.sum()
}

fn rank_steps(layer: &MeshLayer, pass: Pass) -> Vec<RankStep> {
    let plan = layer.plan();
    match pass {
        Pass::Forward => plan.evaluation_steps().to_vec(),
        Pass::Both => [&plan.steps[..], &plan.backward[..]].concat(),
    }
}

fn named(output: Output, name: &str) -> Result<(String, Vec<u8>)> {
    let tensor = output.get(name).ok_or(format!("no {name}"))?;
    Ok((name.to_string(), tensor.data.to_vec()))
}
