//! Exchanges between ranks in candle's graph, of f32 tensors along the first dimension.

use crate::host::{lend, tensor};
use candle_core::{CpuStorage, CustomOp1, DType, Error, Layout, Result, Shape, Tensor};
use moesaic::Tensor as HostTensor;
use moesaic::mesh::{ProcessGroup, Ranks};

/// An exchange of tensors between ranks, and of their gradients. All ranks of a
/// group call the same exchanges and walk their graphs backward in the same
/// order, with tensors of one shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exchange {
    /// Every rank receives the tensors of all, concatenated. The gradient of a
    /// rank's tensor is the sum of all ranks' gradients for it
    /// ([`Exchange::SumParts`]).
    Gather,
    /// Each rank keeps its part of a tensor that all have. Gradients are
    /// gathered.
    Split,
    /// Part `q` goes to rank `q`, forward and backward.
    AllToAll,
    /// Rank `q` receives part `q` of the sum over ranks. Gradients are
    /// gathered.
    SumParts,
    /// Every rank receives the sum over ranks. The gradient, which is the same
    /// on all ranks, passes unchanged.
    Sum,
    /// The tensor stays as it is. Gradients, of which each rank has a part, are
    /// summed.
    SumGradients,
}

impl Exchange {
    fn backward(self) -> Option<Exchange> {
        match self {
            Exchange::Gather => Some(Exchange::SumParts),
            Exchange::Split | Exchange::SumParts => Some(Exchange::Gather),
            Exchange::AllToAll => Some(Exchange::AllToAll),
            Exchange::Sum => None,
            Exchange::SumGradients => Some(Exchange::Sum),
        }
    }

    /// Returns the values, and the size of the first dimension after the
    /// exchange.
    fn run(
        self,
        (ranks, among): (&Ranks, ProcessGroup),
        values: &[f32],
        rows: usize,
    ) -> Result<(Vec<f32>, usize)> {
        let (_, size) = ranks.rank_and_size(among);
        let cut = !matches!(
            self,
            Exchange::Gather | Exchange::Sum | Exchange::SumGradients
        );
        if cut && !rows.is_multiple_of(size) {
            candle_core::bail!("{rows} rows cannot be cut into parts for {size} ranks");
        }
        let what = format!("{self:?} in a graph");
        let done = match self {
            Exchange::Gather => ranks.gather(values, among, &what),
            Exchange::Split => Ok(ranks.scattered(values, among).to_vec()),
            Exchange::AllToAll => {
                let parts = values.chunks(values.len().div_ceil(size).max(1));
                let mut parts: Vec<Vec<f32>> = parts.map(<[f32]>::to_vec).collect();
                parts.resize(size, Vec::new()); // of nothing there are no parts
                let got = ranks.all_to_all(&parts, among, &what);
                got.map(|parts| parts.concat())
            }
            Exchange::SumParts => ranks.sum_scattered(values, among, &what),
            Exchange::Sum => {
                let mut sum = values.to_vec();
                ranks.sum(&mut sum, among, &what).map(|()| sum)
            }
            Exchange::SumGradients => Ok(values.to_vec()),
        };
        let rows = match self {
            Exchange::Gather => rows * size,
            Exchange::Split | Exchange::SumParts => rows / size,
            _ => rows,
        };
        Ok((done.map_err(Error::wrap)?, rows))
    }
}

/// Applies an exchange as a differentiable operation: takes `x [R, ..]` in f32
/// and exchanges along the first dimension.
///
/// # Errors
/// The tensor has no dimension, is not f32, or its rows cannot be shared by the
/// ranks; and the errors of the exchange.
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use moesaic::collectives::{Call, threads};
/// use moesaic::{Engine, Mesh, Parallel};
/// use moesaic::mesh::ProcessGroup;
/// use moesaic_candle::{Exchange, exchange};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let engine = Engine::cpu()?;
/// let device = |_| Ok(engine.device().clone());
/// let ranks = threads::run(2, device, |mut world| {
///     let mesh = Mesh::new(&mut world, Parallel { dp: 2, ..Parallel::default() })?;
///     let x = Var::ones((3, 4), DType::F32, &Device::Cpu)?;
///     let all = exchange(Exchange::Gather, &engine.ranks(&mesh), ProcessGroup::World, &x)?;
///     let gradients = all.sum_all()?.backward()?;
///     world.finish(&Call::new("end"))?;
///     let dx = gradients.get(&x).ok_or("takes part")?.sum_all()?.to_scalar::<f32>()?;
///     Ok::<_, Box<dyn std::error::Error + Send + Sync>>((all.dims().to_vec(), dx))
/// })?;
/// for found in ranks {
///     assert_eq!(found.unwrap().unwrap(), (vec![6, 4], 24.0)); // of the losses of both
/// }
/// # Ok(())
/// # }
/// ```
pub fn exchange(what: Exchange, ranks: &Ranks, among: ProcessGroup, x: &Tensor) -> Result<Tensor> {
    let op = Exchanged {
        what,
        ranks: ranks.clone(),
        among,
    };
    x.contiguous()?.apply_op1(op)
}

struct Exchanged {
    what: Exchange,
    ranks: Ranks,
    among: ProcessGroup,
}

impl CustomOp1 for Exchanged {
    fn name(&self) -> &'static str {
        "moesaic-exchange"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (CpuStorage::F32(data), Some((start, end))) = (storage, layout.contiguous_offsets())
        else {
            candle_core::bail!("ranks exchange f32 tensors in a graph: convert it")
        };
        let mut shape = layout.dims().to_vec();
        let Some(rows) = shape.first_mut() else {
            candle_core::bail!("a number has no rows to exchange: give it a dimension")
        };
        let of = (&self.ranks, self.among);
        let (values, after) = self.what.run(of, &data[start..end], *rows)?;
        *rows = after;
        Ok((CpuStorage::F32(values), Shape::from(shape)))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let Some(what) = self.what.backward() else {
            return Ok(Some(dy.clone()));
        };
        let of = (&self.ranks, self.among);
        lend(dy, moesaic::DType::F32, dy.dims(), |host| {
            let rows = dy.dims().first().copied().unwrap_or(0);
            let (values, _) = what.run(of, &host.to_f32(), rows)?;
            let dx = HostTensor::owned(x.dims(), values);
            tensor(&dx, x.dims()).to_dtype(DType::F32).map(Some)
        })
    }
}
