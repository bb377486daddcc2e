//! The inputs of a call.

use crate::host::{candle_type, copied, lend, named, wrong_type};
use candle_core::{Device, Error, Result, Tensor};
use moesaic::{Input, Layer, LayerTensor, LayerTensorRole};
use moesaic::{Tensor as HostTensor, TensorDim, Tensors};
use std::collections::BTreeMap;

/// The tokens of a call and the further inputs of its layer's spec. Tensors
/// with a value per token have the leading sizes of `x`, or `[T]` in their
/// place; integers may be of any of candle's types.
#[derive(Clone, Debug)]
pub struct Inputs {
    pub(crate) x: Tensor,
    pub(crate) others: BTreeMap<&'static str, Tensor>,
    pub(crate) capacity_factor: Option<f64>,
}

impl Inputs {
    /// Makes inputs of the tokens `[.., d]`, in the layer's activation type.
    pub fn new(x: &Tensor) -> Inputs {
        Inputs {
            x: x.clone(),
            others: BTreeMap::new(),
            capacity_factor: None,
        }
    }

    /// Sets the ids `[..]` that a table router looks up.
    pub fn token_ids(self, ids: &Tensor) -> Inputs {
        self.with("token_ids", ids)
    }

    /// Sets the decision `[.., K]` of a router outside the layer (`kind =
    /// "external"`). The gradient of `weights` flows back to the operation that
    /// computed them.
    pub fn routing(self, ids: &Tensor, weights: &Tensor) -> Inputs {
        self.with("topk_ids", ids).with("topk_weights", weights)
    }

    /// Sets the mask `[..]` of tokens that count, if the spec has `token_mask`:
    /// 0 is padding.
    pub fn token_mask(self, mask: &Tensor) -> Inputs {
        self.with("token_mask", mask)
    }

    /// Sets the number of the K slots that this call uses, if the spec has
    /// `active_k`.
    ///
    /// # Errors
    /// None on a CPU.
    pub fn active_k(self, active: u32) -> Result<Inputs> {
        Ok(self.with("active_k", &Tensor::new(&[active], &Device::Cpu)?))
    }

    /// Sets the sequence `[..]` of each token, for a `sequence` loss.
    pub fn sequence_ids(self, ids: &Tensor) -> Inputs {
        self.with("sequence_ids", ids)
    }

    /// Sets the choices of each expert `[E]` and the number of tokens over the
    /// group of a `global` loss, such as all micro-batches. The ranks of a mesh
    /// count themselves, so a layer over them reads neither.
    ///
    /// # Errors
    /// None on a CPU.
    pub fn global(self, counts: &Tensor, tokens: i64) -> Result<Inputs> {
        let tokens = Tensor::new(&[tokens], &Device::Cpu)?;
        let given = self.with("global_counts", counts);
        Ok(given.with("global_tokens", &tokens))
    }

    /// Sets a capacity factor for this call instead of the spec's.
    pub fn capacity_factor(mut self, factor: f64) -> Inputs {
        self.capacity_factor = Some(factor);
        self
    }

    fn with(mut self, name: &'static str, tensor: &Tensor) -> Inputs {
        self.others.insert(name, tensor.clone());
        self
    }

    /// Returns the sizes of `x` before its width.
    pub(crate) fn leading(&self) -> &[usize] {
        let dims = self.x.dims();
        &dims[..dims.len().saturating_sub(1)]
    }

    pub(crate) fn width(&self) -> usize {
        self.x.dims().last().copied().unwrap_or(0)
    }

    pub(crate) fn tokens(&self) -> usize {
        self.leading().iter().product()
    }

    /// Passes the inputs of a call to a function, in the engine's form.
    ///
    /// # Errors
    /// An input is missing, misshapen, of another type, or one that the layer would not read.
    pub(crate) fn lend<R>(
        &self,
        layer: &Layer,
        run: impl FnOnce(&Input<'_>) -> Result<R>,
    ) -> Result<R> {
        let dtype = layer.spec().precision.activations;
        let (given, wanted) = (self.x.dtype(), candle_type(dtype));
        if given != wanted {
            return Err(wrong_type(given, wanted));
        }
        let tensors = self.hosts(layer)?;
        lend(&self.x, dtype, &[self.tokens(), self.width()], |x| {
            let mut input = Input {
                tokens: self.tokens(),
                tensors,
                capacity_factor: self.capacity_factor,
            };
            input.insert("x", x);
            run(&input)
        })
    }

    /// Returns everything but `x` in the engine's form. An input that the layer
    /// would not read is an error: its spec lacks the option that reads it.
    fn hosts(&self, layer: &Layer) -> Result<Tensors<'static>> {
        let is_input = |tensor: &&LayerTensor| tensor.role == LayerTensorRole::Input;
        let host = |(name, tensor): (&&'static str, &Tensor)| {
            let Some(input) = layer.tensor(name).filter(is_input) else {
                let inputs = layer.tensors().iter().filter(is_input);
                let known: Vec<&str> = inputs.map(|input| input.name.as_str()).collect();
                candle_core::bail!("the layer reads no `{name}`, only {}", known.join(", "))
            };
            let host = self.host(tensor, input).map_err(|e| named(name, e))?;
            Ok((name.to_string(), host))
        };
        self.others.iter().map(host).collect()
    }

    fn host(&self, tensor: &Tensor, input: &LayerTensor) -> Result<HostTensor<'static>> {
        let shape = input.shape(self.tokens());
        let by_token = input.dims.first() == Some(&TensorDim::PerToken(1));
        let leading = by_token.then(|| [self.leading(), &shape[1..]].concat());
        if tensor.dims() == shape || Some(tensor.dims()) == leading.as_deref() {
            copied(tensor, input.dtype, &shape)
        } else {
            let wanted = leading.unwrap_or(shape);
            let problem = format!("has shape {:?}, expected {wanted:?}", tensor.dims());
            Err(Error::Msg(problem))
        }
    }
}
