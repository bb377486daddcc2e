//! The layer in candle's operations, and what tests compare it by.

use candle_core::backprop::GradStore;
use candle_core::{D, DType, Device, Result, Tensor, Var};
use moesaic::spec::canonical_tensors;
use moesaic::{Engine, LayerSpec};
use moesaic_candle::{MoeLayer, RngKey};
use std::collections::BTreeMap;

/// A layer, the variables behind its weights, and what draws more of them.
pub struct Case {
    pub spec: LayerSpec,
    pub vars: BTreeMap<String, Var>,
    pub layer: MoeLayer,
    state: u64,
}

impl Case {
    /// The layer of a spec, its variables in the spec's types.
    pub fn new(toml: &str) -> Result<Case> {
        Case::with(toml, |dtype| match dtype {
            moesaic::DType::F16 => DType::F16,
            moesaic::DType::Bf16 => DType::BF16,
            _ => DType::F32,
        })
    }

    /// Its variables in types of the test's choice.
    pub fn with(toml: &str, dtype: fn(moesaic::DType) -> DType) -> Result<Case> {
        let spec = LayerSpec::from_toml(toml).unwrap_or_else(|e| panic!("{e}"));
        let (mut vars, mut state) = (BTreeMap::new(), 3);
        for tensor in canonical_tensors(&spec)
            .into_iter()
            .filter(|t| t.dtype.is_float())
        {
            let values = random(&tensor.shape, 0.4, &mut state)?;
            let values = values.to_dtype(dtype(tensor.dtype))?;
            vars.insert(tensor.name, Var::from_tensor(&values)?);
        }
        let weights = tensors(&vars);
        let engine = Engine::cpu().expect("a C compiler");
        let layer = MoeLayer::new(&engine, &spec, &weights)?;
        Ok(Case {
            spec,
            vars,
            layer,
            state,
        })
    }

    /// A variable of numbers between -1 and 1.
    pub fn draw(&mut self, shape: &[usize]) -> Result<Var> {
        Var::from_tensor(&random(shape, 1.0, &mut self.state)?)
    }

    /// The layer on tokens `[T, d]`, dropless, in f32.
    pub fn in_candle(&self, x: &Tensor) -> Result<Tensor> {
        let (ids, weights) = self.decide(&self.logits(x)?, self.spec.shape.top_k)?;
        self.experts(x, &ids, &weights)
    }

    pub fn logits(&self, x: &Tensor) -> Result<Tensor> {
        let logits = x.matmul(&self.weight("router.weight")?.t()?)?;
        if self.vars.contains_key("router.bias") {
            logits.broadcast_add(&self.weight("router.bias")?)
        } else {
            Ok(logits)
        }
    }

    /// The best of softmax, renormalised.
    pub fn decide(&self, logits: &Tensor, top_k: usize) -> Result<(Tensor, Tensor)> {
        let scores = softmax(logits)?;
        let ids = scores.arg_sort_last_dim(false)?;
        let ids = ids.narrow(1, 0, top_k)?.contiguous()?;
        let chosen = scores.gather(&ids, 1)?;
        let weights = chosen.broadcast_div(&chosen.sum_keepdim(1)?)?;
        Ok((ids, weights))
    }

    /// Every expert sees every token, and the weight of those that were not
    /// selected is zero.
    pub fn experts(&self, x: &Tensor, ids: &Tensor, weights: &Tensor) -> Result<Tensor> {
        let mut y = x.zeros_like()?;
        for expert in 0..self.spec.shape.experts {
            let mine = ids.eq(expert as u32)?.to_dtype(DType::F32)?;
            let weight = (weights * mine)?.sum_keepdim(1)?;
            let hidden =
                (self.linear(x, "gate", expert)?.silu()? * self.linear(x, "up", expert)?)?;
            let out = self.linear(&hidden, "down", expert)?;
            y = (y + out.broadcast_mul(&weight)?)?;
        }
        Ok(y)
    }

    fn linear(&self, rows: &Tensor, part: &str, expert: usize) -> Result<Tensor> {
        let matrix = self
            .weight(&format!("experts.{part}.weight"))?
            .get(expert)?;
        let product = rows.matmul(&matrix.t()?)?;
        let bias = format!("experts.{part}.bias");
        if self.vars.contains_key(&bias) {
            product.broadcast_add(&self.weight(&bias)?.get(expert)?)
        } else {
            Ok(product)
        }
    }

    fn weight(&self, name: &str) -> Result<Tensor> {
        self.vars[name].to_dtype(DType::F32)
    }

    /// Gradients of every variable and of `x`, ours and candle's.
    pub fn assert_gradients(
        &self,
        x: &Var,
        ours: &GradStore,
        candles: &GradStore,
        tolerance: f64,
    ) -> Result<()> {
        let all = self.vars.iter().map(|(name, var)| (name.as_str(), var));
        for (name, var) in all.chain([("x", x)]) {
            let [got, wanted] = [ours, candles].map(|store| store.get(var).cloned());
            let (got, wanted) = (got.expect("takes part"), wanted.expect("takes part"));
            assert_eq!(got.dtype(), var.dtype(), "{name}");
            assert_close(name, &got, &wanted, tolerance)?;
        }
        Ok(())
    }
}

/// The variables as a layer takes them.
pub fn tensors(vars: &BTreeMap<String, Var>) -> BTreeMap<String, Tensor> {
    let each = vars.iter();
    each.map(|(name, var)| (name.clone(), var.as_tensor().clone()))
        .collect()
}

/// Returns the RNG key of a step.
pub fn step(step: u64) -> RngKey {
    RngKey {
        step,
        ..RngKey::default()
    }
}

pub fn softmax(logits: &Tensor) -> Result<Tensor> {
    let exp = logits
        .broadcast_sub(&logits.max_keepdim(D::Minus1)?)?
        .exp()?;
    exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)
}

pub fn random(shape: &[usize], scale: f64, state: &mut u64) -> Result<Tensor> {
    let count: usize = shape.iter().product();
    let mut next = || {
        *state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        ((*state >> 40) as f64 / f64::from(1 << 23) - 1.0) * scale
    };
    let values: Vec<f32> = (0..count).map(|_| next() as f32).collect();
    Tensor::from_vec(values, shape, &Device::Cpu)
}

pub fn floats(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}

pub fn assert_close(name: &str, got: &Tensor, expected: &Tensor, tolerance: f64) -> Result<()> {
    assert_eq!(got.dims(), expected.dims(), "{name}");
    let (got, expected) = (floats(got)?, floats(expected)?);
    let largest = expected.iter().fold(0f32, |most, v| most.max(v.abs()));
    let errors = got.iter().zip(&expected).map(|(a, b)| (a - b).abs());
    let error = errors.fold(
        0f32,
        |most, e| if e > most || e.is_nan() { e } else { most },
    );
    assert!(largest > 0.0, "{name} is zero: nothing was compared");
    assert!(
        f64::from(error) <= tolerance * f64::from(largest),
        "{name}: error {error:e} of {largest:e}"
    );
    Ok(())
}
