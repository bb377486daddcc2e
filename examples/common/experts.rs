//! A Mixture-of-Experts layer of moesaic inside a model. The weights live on the host for the
//! optimizer, and the model copies them to the layer before each pass.

use super::feed_forward::FeedForward;
use super::ops::{Module, Param};
use moesaic::reference::Random;
use moesaic::spec::{TensorSpec, canonical_tensors};
use moesaic::{
    Engine, EngineError, Input, Layer, LayerSpec, RngKey, Saved, Tensor, Tensors, Training,
};

/// Returns a layer of ReLU experts with a softmax over the selected logits, as in FastMoE's
/// Transformer-XL, and Switch's balancing loss.
pub fn spec(width: usize, hidden: usize, experts: usize, top_k: usize) -> LayerSpec {
    let text = format!(
        "shape = {{ model_dim = {width}, hidden_dim = {hidden}, experts = {experts}, top_k = {top_k} }}\n\
         router = {{ score = \"softmax-selected\" }}\n\
         experts = {{ form = \"plain\", activation = \"relu\", bias = true }}\n\
         [[losses]]\nkind = \"switch\"\ncoefficient = 0.01\n"
    );
    LayerSpec::from_toml(&text).expect("sizes are positive and top_k is at most experts")
}

/// Returns weights before the first step: uniform in `±1/√inputs`, those of the last map times
/// `gain`; biases 0.
pub fn start(spec: &LayerSpec, gain: f64, random: &mut Random) -> Vec<(TensorSpec, Param)> {
    let mut start = |tensor: TensorSpec| {
        let count = tensor.shape.iter().product();
        let inputs = *tensor.shape.last().expect("no scalars") as f64;
        let last = tensor.name.starts_with("experts.down");
        let bound = if last { gain } else { 1.0 } / inputs.sqrt();
        let param = if tensor.name.ends_with(".weight") {
            Param::uniform(count, bound, random)
        } else {
            Param::constant(count, 0.0)
        };
        (tensor, param)
    };
    canonical_tensors(spec)
        .into_iter()
        .map(&mut start)
        .collect()
}

/// Returns the layer's tensors by name.
pub fn tensors(params: &[(TensorSpec, Param)]) -> Tensors<'_> {
    params.iter().fold(Tensors::new(), |weights, (tensor, p)| {
        weights.with(&tensor.name, &tensor.shape, &p.value)
    })
}

/// The layer, its weights and the state of its last forward pass.
pub struct Experts {
    layer: Layer,
    params: Vec<(TensorSpec, Param)>,
    saved: Option<Saved>,
}

impl Experts {
    /// Makes the layer with weights that [`start`] draws.
    pub fn new(
        engine: &Engine,
        spec: &LayerSpec,
        gain: f64,
        random: &mut Random,
    ) -> Result<Experts, EngineError> {
        let params = start(spec, gain, random);
        let weights = tensors(&params);
        let layer = engine.training_layer(spec, &weights, Training::default())?;
        drop(weights);
        Ok(Experts {
            layer,
            params,
            saved: None,
        })
    }

    fn rows(&self, x: &[f32]) -> usize {
        x.len() / self.layer.spec().shape.model_dim
    }
}

impl FeedForward for Experts {
    fn forward(&mut self, x: Vec<f32>) -> Result<Vec<f32>, EngineError> {
        for (tensor, param) in &self.params {
            let value = Tensor::new(&tensor.shape, &param.value);
            self.layer.set_weight(&tensor.name, &value)?;
        }
        let input = Input::new(self.rows(&x), &x);
        let (output, saved) = self
            .layer
            .forward_train(input.reading(&["y"]), RngKey::default())?;
        self.saved = Some(saved);
        Ok(output.y().to_f32())
    }

    fn backward(&mut self, dy: &[f32]) -> Result<Vec<f32>, EngineError> {
        let saved = self.saved.take().expect("a forward pass came before");
        let shape = [saved.tokens(), self.layer.spec().output_dim()];
        let dy = Tensor::new(&shape, dy);
        let output = self.layer.backward(&saved, &dy, false)?;
        for (tensor, param) in &mut self.params {
            param.grad = self.layer.gradient(&tensor.name)?.to_f32();
        }
        Ok(output.get("dx").expect("backward gives it").to_f32())
    }
}

impl Module for Experts {
    fn params<'a>(&'a mut self, prefix: &str, visit: &mut dyn FnMut(String, &'a mut Param)) {
        for (tensor, param) in &mut self.params {
            visit(format!("{prefix}.{}", tensor.name), param);
        }
    }
}
