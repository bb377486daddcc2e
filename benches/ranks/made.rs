//! A layer as a party has it: whole, or a rank's part.

use crate::Result;
use crate::data::floats;
use crate::select::Pass;
use moesaic::plan::{RankPlan, RankStep};
use moesaic::weights::{Checkpoint, LayerReader, LoadOptions};
use moesaic::{
    DType, Engine, Input, Layer, LayerOptions, LayerSpec, Mesh, Output, RngKey, Tensor, Training,
};
use rayon::prelude::*;
use std::path::Path;

pub struct Made(Layer);

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
        let options = LayerOptions {
            mesh,
            training,
            ..LayerOptions::default()
        };
        Ok(Made(engine.layer_with(spec, &weights, options)?))
    }

    /// Launches of a call, and exchanges.
    pub fn steps(&self, pass: Pass) -> [usize; 2] {
        let Some(plan) = self.0.rank_plan() else {
            let plan = self.0.plan();
            let launches = match pass {
                Pass::Forward => plan.evaluation_steps().len(),
                Pass::Both => plan.steps.len() + plan.backward.len(),
            };
            return [launches, 0];
        };
        let steps = rank_steps(&plan, pass);
        let launches = |step: &&RankStep| matches!(step, RankStep::Launch { .. });
        let launches = steps.iter().filter(launches).count();
        [launches, steps.len() - launches]
    }

    /// Returns the bytes that, by the plan, this rank sends to others and
    /// keeps, if every expert gets equally many rows.
    pub fn planned(&self, pass: Pass, tokens: usize, ranks: usize) -> [u64; 2] {
        let Some(plan) = self.0.rank_plan() else {
            return [0, 0];
        };
        let sent = plan.bytes_of(&rank_steps(&plan, pass), tokens as u64, ranks);
        [sent.node, sent.here]
    }

    pub fn once(&self, pass: Pass, call: &Call) -> Result<Named> {
        let layer = &self.0;
        let mut input = Input {
            tokens: call.tokens,
            ..Input::default()
        };
        input.insert("x", self.rows(call.tokens, &call.x));
        if pass == Pass::Forward {
            return Ok(vec![named(layer.forward(&input)?, "y")?]);
        }
        let dy = self.rows(call.tokens, &call.dy);
        let (output, saved) = layer.forward_train(&input, RngKey::default())?;
        let back = layer.backward(&saved, &dy, false)?;
        layer.reduce_gradients()?;
        Ok(vec![named(output, "y")?, named(back, "dx")?])
    }

    fn rows<'a>(&self, tokens: usize, data: &'a [u8]) -> Tensor<'a> {
        let spec = self.0.spec();
        Tensor {
            dtype: spec.precision.activations,
            shape: vec![tokens, spec.shape.model_dim],
            data: data.into(),
        }
    }

    /// Gradients of weights, each times a fixed vector along its last dimension.
    pub fn gradients(&self) -> Result<Named> {
        let mut list = Named::new();
        for (name, tensor) in self.0.gradients()? {
            let width = *tensor.shape.last().unwrap_or(&1);
            let rows = tensor.data.par_chunks(width.max(1) * 4);
            let sums: Vec<f32> = rows.map(dot).collect();
            let bytes = sums.into_iter().flat_map(f32::to_le_bytes).collect();
            list.push((format!("grad.{name}"), bytes));
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

fn rank_steps(plan: &RankPlan, pass: Pass) -> Vec<RankStep> {
    match pass {
        Pass::Forward => plan.evaluation_steps().to_vec(),
        Pass::Both => [&plan.steps[..], &plan.backward[..]].concat(),
    }
}

fn named(output: Output, name: &str) -> Result<(String, Vec<u8>)> {
    let tensor = output.get(name).ok_or(format!("no {name}"))?;
    Ok((name.to_string(), tensor.data.to_vec()))
}
