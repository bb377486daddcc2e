//! The first weights of a layer that is trained from nothing.

use crate::{LayerSpec, Tensor, Tensors};
use moesaic_spec::{RouterKind, TensorSpec, WeightStart, canonical_tensors};

/// The distribution of a new layer's weights.
///
/// | weight | [`Init::Linear`] | [`Init::Megatron`] |
/// |---|---|---|
/// | matrices | uniform in ±1/√(columns) | normal, `std` |
/// | `experts.down`, `shared.N.down` | the same | normal, `std` / √(2 · `layers`) |
/// | biases of a matrix | uniform in ±1/√(columns of the matrix) | 0 |
/// | weights that one kind of router has | as docs/SEMANTICS.md says | the same |
/// | `router.select_bias` | 0 | 0 |
/// | `router.load` | 1 / experts | 1 / experts |
/// | scales | 1 | 1 |
///
/// A number depends only on the seed, the weight's name, the expert and its place there. So a spec
/// with one more expert has the same first experts, and all ranks draw the same router.
///
/// ```
/// use moesaic::{Init, LayerSpec};
///
/// # fn main() -> Result<(), moesaic::Error> {
/// let spec = LayerSpec::from_toml(
///     "shape = { model_dim = 64, hidden_dim = 128, experts = 8, top_k = 2 }",
/// )?;
/// let weights = Init::Linear.weights(&spec, 1);
/// let up = weights["experts.up.weight"].to_f32();
/// assert!(up.iter().all(|v| v.abs() <= 1.0 / 8.0)); // 1/√64
/// # let layer = moesaic::example::engine().layer(&spec, &weights)?;
/// # assert_eq!(layer.spec().shape.experts, 8);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Init {
    /// The distribution of `torch.nn.Linear`, which Tutel's and FastMoE's gates and experts use.
    Linear,
    /// Megatron's, which scales what a residual connection adds by the depth of the model.
    Megatron {
        /// The standard deviation: `init_method_std`, 0.02 in Megatron unless set.
        std: f32,
        /// The number of layers of the model.
        layers: usize,
    },
}

impl Init {
    /// Draws the weights of a layer, in the types of its spec. Tensors that are not floats are left
    /// out, for you to insert: `router.table`, and the codes of quantized experts.
    pub fn weights(self, spec: &LayerSpec, seed: u64) -> Tensors<'static> {
        let mut weights = Tensors::new();
        for (tensor, kind) in self.distributions(spec) {
            let values = draw(kind, &tensor, seed);
            let rounded = Tensor::rounded(tensor.dtype, &tensor.shape, &values);
            weights.insert(&tensor.name, rounded.into_static());
        }
        weights
    }

    /// Returns the weights that [`Init::weights`] draws, each with its distribution, for another
    /// library's generator.
    pub fn distributions(self, spec: &LayerSpec) -> Vec<(TensorSpec, Distribution)> {
        let all = canonical_tensors(spec);
        let drawn = |tensor: &&TensorSpec| {
            tensor.dtype.is_float() && spec.precision.format_of(&tensor.name).is_none()
        };
        let tensors = all.iter().filter(drawn);
        tensors
            .map(|tensor| {
                let distribution = self.distribution(spec.router.kind, tensor, &all);
                (tensor.clone(), distribution)
            })
            .collect()
    }

    fn distribution(
        self,
        router: RouterKind,
        tensor: &TensorSpec,
        all: &[TensorSpec],
    ) -> Distribution {
        let columns = |tensor: &TensorSpec| tensor.shape.last().copied().unwrap_or(1) as f32;
        match router.def().weight(&tensor.name).map(|weight| weight.start) {
            Some(WeightStart::Normal(deviation)) => return Distribution::Normal(deviation),
            Some(WeightStart::Constant(value)) => return Distribution::Constant(value),
            Some(WeightStart::Matrix) | None => {}
        }
        match tensor.name.as_str() {
            "router.select_bias" => return Distribution::Constant(0.0),
            "router.load" => return Distribution::Constant(1.0 / columns(tensor)),
            "latent.norm.weight" | "latent.input_norm.weight" | "expert_norm.weight" => {
                return Distribution::Constant(1.0);
            }
            name if name.ends_with("_scale") => return Distribution::Constant(1.0),
            _ => {}
        }
        let matrix = tensor.name.strip_suffix(".bias");
        match (self, matrix) {
            (Init::Linear, None) => Distribution::Uniform(columns(tensor).sqrt().recip()),
            (Init::Linear, Some(matrix)) => {
                let weight = format!("{matrix}.weight");
                let of = all.iter().find(|tensor| tensor.name == weight);
                Distribution::Uniform(of.map_or(0.0, |of| columns(of).sqrt().recip()))
            }
            (Init::Megatron { .. }, Some(_)) => Distribution::Constant(0.0),
            (Init::Megatron { std, layers }, None) if is_last_matrix(&tensor.name) => {
                Distribution::Normal(std / (2.0 * layers.max(1) as f32).sqrt())
            }
            (Init::Megatron { std, .. }, None) => Distribution::Normal(std),
        }
    }
}

/// Returns true for the matrix whose product an expert adds to the residual connection.
fn is_last_matrix(name: &str) -> bool {
    name.ends_with(".down.weight") && !name.starts_with("latent.")
}

/// The numbers of one weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Distribution {
    /// One number.
    Constant(f32),
    /// Between the number and its negative.
    Uniform(f32),
    /// Around zero, with this standard deviation.
    Normal(f32),
}

/// Draws a weight, each expert from a stream of its own.
fn draw(kind: Distribution, tensor: &TensorSpec, seed: u64) -> Vec<f32> {
    let count: usize = tensor.shape.iter().product();
    let of_experts = tensor.name.starts_with("experts.");
    let experts = if of_experts {
        tensor.shape[0].max(1)
    } else {
        1
    };
    let name = tensor.name.bytes();
    let stream = name.fold(splitmix64(seed), |key, byte| {
        splitmix64(key ^ u64::from(byte))
    });
    let mut values = Vec::with_capacity(count);
    for expert in 0..experts {
        let key = splitmix64(stream ^ expert as u64);
        values.extend((0..count / experts).map(|at| kind.value(key, at as u64)));
    }
    values
}

impl Distribution {
    /// Returns the number at a place of a stream.
    fn value(self, key: u64, at: u64) -> f32 {
        let bits = splitmix64(key ^ splitmix64(at));
        // Never 0, whose logarithm would be infinite.
        let unit = |bits: u64| ((bits >> 40) as f64 + 0.5) / f64::from(1 << 24);
        match self {
            Distribution::Constant(value) => value,
            Distribution::Uniform(most) => (unit(bits) * 2.0 - 1.0) as f32 * most,
            Distribution::Normal(std) => {
                let (radius, turn) = (unit(bits), unit(splitmix64(bits)));
                let normal = (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * turn).cos();
                normal as f32 * std
            }
        }
    }
}

/// Returns the output of splitmix64 in state `x`.
fn splitmix64(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    const SPEC: &str = "
shape = { model_dim = 64, hidden_dim = 256, experts = 8, top_k = 2 }
experts = { bias = true }
router = { bias = true, select_bias = true }
precision = { weights = \"bf16\" }
";

    fn spec(experts: usize) -> LayerSpec {
        LayerSpec::from_toml(&SPEC.replace("experts = 8", &format!("experts = {experts}")))
            .unwrap_or_else(|e| panic!("{e}"))
    }

    /// Returns mean and standard deviation.
    fn moments(values: &[f32]) -> [f64; 2] {
        let count = values.len() as f64;
        let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / count;
        let squares = values.iter().map(|v| (f64::from(*v) - mean).powi(2));
        [mean, (squares.sum::<f64>() / count).sqrt()]
    }

    fn assert_moments(weights: &Tensors<'_>, name: &str, std: f64) {
        let [mean, found] = moments(&weights[name].to_f32());
        assert!(mean.abs() < 0.02 * std, "{name}: mean {mean}");
        assert!(
            (found / std - 1.0).abs() < 0.02,
            "{name}: {found}, not {std}"
        );
    }

    #[test]
    fn linear_is_uniform_by_columns() {
        let weights = Init::Linear.weights(&spec(8), 3);
        for (name, columns) in [("up", 64.0f64), ("gate", 64.0), ("down", 256.0)] {
            let bound = 1.0 / columns.sqrt();
            for end in ["weight", "bias"] {
                let name = format!("experts.{name}.{end}");
                let most = weights[name.as_str()].to_f32().into_iter().map(f32::abs);
                let most = f64::from(most.fold(0.0, f32::max));
                assert!(
                    most <= bound && most > 0.9 * bound,
                    "{name}: {most}, {bound}"
                );
            }
            let name = format!("experts.{name}.weight");
            assert_moments(&weights, &name, bound / 3.0f64.sqrt());
            assert_eq!(weights[name.as_str()].dtype, DType::Bf16);
        }
        assert!(
            weights["router.select_bias"]
                .to_f32()
                .iter()
                .all(|v| *v == 0.0)
        );
    }

    #[test]
    fn megatron_scales_the_last_matrix_by_depth() {
        let init = Init::Megatron {
            std: 0.02,
            layers: 8,
        };
        let weights = init.weights(&spec(8), 3);
        assert_moments(&weights, "experts.up.weight", 0.02);
        assert_moments(&weights, "experts.down.weight", 0.005);
        assert!(
            weights["experts.up.bias"]
                .to_f32()
                .iter()
                .all(|v| *v == 0.0)
        );
    }

    #[test]
    fn experts_do_not_depend_on_how_many_there_are() {
        let [few, many] = [4, 8].map(|experts| Init::Linear.weights(&spec(experts), 3));
        let name = "experts.up.weight";
        let few = few[name].to_f32();
        assert_eq!(few, many[name].to_f32()[..few.len()]);
        assert_ne!(few[..64], few[64 * 256..][..64]);
        let other = Init::Linear.weights(&spec(4), 4);
        assert_ne!(few, other[name].to_f32());
    }

    /// All weights that the engine wants, of specs with many kinds of them.
    #[test]
    fn every_float_is_drawn() {
        for text in [
            "router = { kind = \"cosine\", projection_dim = 16 }",
            "[[shared]]\nhidden_dim = 8\ngate = \"residual\"",
        ] {
            let text = format!(
                "shape = {{ model_dim = 64, hidden_dim = 8, experts = 4, top_k = 2 }}\n{text}"
            );
            let spec = LayerSpec::from_toml(&text).unwrap_or_else(|e| panic!("{e}"));
            let weights = Init::Linear.weights(&spec, 1);
            for tensor in canonical_tensors(&spec) {
                assert_eq!(weights[tensor.name.as_str()].shape, tensor.shape);
            }
        }
    }
}
