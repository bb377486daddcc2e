//! A rank's part of a Mixture-of-Experts layer inside a model.

use super::experts::{start, tensors};
use super::feed_forward::FeedForward;
use super::ops::{Module, Param};
use moesaic::Saved;
use moesaic::reference::Random;
use moesaic::spec::{Loss, LossKind};
use moesaic::{
    Engine, EngineError, Input, Layer, LayerOptions, LayerSpec, Mesh, RngKey, Tensor, Training,
};

/// This rank's part of the layer, its weights and the state of its last forward pass.
pub struct MeshExperts {
    layer: Layer,
    params: Vec<(String, Param)>,
    saved: Option<Saved>,
}

/// Returns the same layer with a loss that balances the tokens of all ranks together, because a
/// loss of kind `switch` covers a single call.
pub fn balanced_together(spec: &LayerSpec) -> LayerSpec {
    let global = |loss: &Loss| Loss {
        kind: match loss.kind {
            LossKind::Switch => LossKind::Global,
            other => other,
        },
        ..loss.clone()
    };
    let losses = spec.losses.iter().map(global).collect();
    LayerSpec {
        losses,
        ..spec.clone()
    }
}

impl MeshExperts {
    /// Makes this rank's part with its part of the weights that one process draws. Gradients cover
    /// this rank's tokens until they are reduced.
    pub fn new(
        engine: &Engine,
        mesh: &Mesh,
        spec: &LayerSpec,
        gain: f64,
        random: &mut Random,
    ) -> Result<MeshExperts, EngineError> {
        let spec = balanced_together(spec);
        let whole = start(&spec, gain, random);
        let whole = tensors(&whole);
        let layer = engine.layer_with(
            &spec,
            &whole,
            LayerOptions::over(mesh).training(Training::default()),
        )?;
        let own = layer.weights_of(&whole)?;
        let params = own.into_iter().map(|(name, part)| {
            let param = Param::of(&part.shape, part.to_f32());
            (name, param)
        });
        Ok(MeshExperts {
            layer,
            params: params.collect(),
            saved: None,
        })
    }

    fn width(&self) -> usize {
        self.layer.spec().shape.model_dim
    }
}

impl FeedForward for MeshExperts {
    fn forward(&mut self, x: Vec<f32>) -> Result<Vec<f32>, EngineError> {
        for (name, param) in &self.params {
            let value = Tensor::new(&param.shape, &param.value);
            self.layer.set_weight(name, &value)?;
        }
        let input = Input::new(x.len() / self.width(), &x);
        let (output, saved) = self
            .layer
            .forward_train(input.reading(&["y"]), RngKey::default())?;
        self.saved = Some(saved);
        Ok(output.y().to_f32())
    }

    fn backward(&mut self, dy: &[f32]) -> Result<Vec<f32>, EngineError> {
        let saved = self.saved.take().expect("a forward pass came before");
        let dy = Tensor::new(&[saved.tokens(), self.width()], dy);
        let output = self.layer.backward(&saved, &dy, false)?;
        let gradients = self.layer.gradients()?;
        for (name, param) in &mut self.params {
            match gradients.get(name.as_str()) {
                Some(gradient) => param.grad = gradient.to_f32(),
                None => param.grad.fill(0.0), // another rank's to move
            }
        }
        Ok(output.get("dx").expect("backward gives it").to_f32())
    }
}

impl Module for MeshExperts {
    fn params<'a>(&'a mut self, prefix: &str, visit: &mut dyn FnMut(String, &'a mut Param)) {
        for (name, param) in &mut self.params {
            visit(format!("{prefix}.{name}"), param);
        }
    }
}
