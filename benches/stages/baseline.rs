//! The layer of fairseq and DeepSpeed over ranks: one-hot products around an exchange of
//! equal parts.

use crate::Result;
use crate::one_hot::OneHot;
use moesaic::collectives::{Algorithm, Call, Collectives, Communicator, Element, Slice};
use moesaic::target::Device;
use moesaic::{Engine, Input, Layer, LayerSpec, Tensor, Tensors, reference};
use std::ops::Range;
use std::sync::Arc;

/// How rows that have come lie before experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Layout {
    /// `[ranks, experts, slots]`, as they came: a product for each expert and source.
    BySource,
    /// `[experts, ranks * slots]`: a product for each expert.
    ByExpert,
}

/// A rank's part.
pub struct Baseline {
    width: usize,
    experts: usize,
    own: usize,
    ranks: usize,
    /// `[experts, width]`.
    router: Vec<f32>,
    device: Arc<dyn Device>,
    /// Experts alone, each as often as there are ranks, and once.
    by_source: Layer,
    by_expert: Layer,
}

/// Weights of some experts, and everything else.
pub fn tensors(weights: &reference::Weights, experts: Range<usize>) -> Tensors<'static> {
    repeated(weights, &experts.collect::<Vec<_>>())
}

fn repeated(weights: &reference::Weights, experts: &[usize]) -> Tensors<'static> {
    let mut tensors = Tensors::new();
    for (name, tensor) in &weights.0 {
        let data: Vec<f32> = tensor.data.iter().map(|v| *v as f32).collect();
        if !name.starts_with("experts.") {
            tensors.insert(name.clone(), Tensor::owned(&tensor.shape, data));
            continue;
        }
        let each = data.len() / tensor.shape[0];
        let rows = experts.iter().map(|e| &data[e * each..(e + 1) * each]);
        let mut shape = tensor.shape.clone();
        shape[0] = experts.len();
        let rows = rows.collect::<Vec<_>>().concat();
        tensors.insert(name.clone(), Tensor::owned(&shape, rows));
    }
    tensors
}

impl Baseline {
    pub fn new(
        engine: &Engine,
        spec: &LayerSpec,
        weights: &reference::Weights,
        (rank, ranks): (usize, usize),
    ) -> Result<Baseline> {
        let own = spec.shape.experts / ranks;
        let first = rank * own;
        let local: Vec<usize> = (first..first + own).collect();
        let alone = |experts: &[usize]| -> Result<Layer> {
            let alone = LayerSpec::from_toml(&format!(
                "shape = {{ model_dim = {}, hidden_dim = {}, experts = {}, top_k = 1 }}\n\
                 router = {{ kind = \"external\" }}\n\
                 experts = {{ form = \"plain\", activation = \"relu\" }}\n",
                spec.shape.model_dim,
                spec.shape.hidden_dim,
                experts.len()
            ))?;
            Ok(engine.layer(&alone, &repeated(weights, experts))?)
        };
        let router = weights.0.iter().find(|(name, _)| *name == "router.weight");
        let (_, router) = router.ok_or("a spec with a router")?;
        Ok(Baseline {
            width: spec.shape.model_dim,
            experts: spec.shape.experts,
            own,
            ranks,
            router: router.data.iter().map(|v| *v as f32).collect(),
            device: engine.device().clone(),
            by_source: alone(&local.repeat(ranks))?,
            by_expert: alone(&local)?,
        })
    }

    /// `y` of this rank's tokens `x`, `[tokens, width]`.
    pub fn forward(&self, world: &mut Communicator, x: &[f32], layout: Layout) -> Result<Vec<f32>> {
        let logits = crate::one_hot::product(
            (x, [self.width, 1]),
            (&self.router, [1, self.width]),
            [x.len() / self.width, self.width, self.experts],
        );
        let gate = OneHot::new(&logits, self.experts);
        let masks = gate.masks();
        let rows = gate.dispatch(&masks, x, self.width);
        let came = self.exchange(world, &rows)?;
        let done = match layout {
            Layout::BySource => self.run(&self.by_source, &came)?,
            Layout::ByExpert => {
                let rows = self.turned(&came, [self.ranks, self.own]);
                self.turned(&self.run(&self.by_expert, &rows)?, [self.own, self.ranks])
            }
        };
        let back = self.exchange(world, &done)?;
        Ok(gate.combine(&masks, &back, self.width))
    }

    /// `[a, b, slots, width]` as `[b, a, slots, width]`.
    fn turned(&self, rows: &[f32], [a, b]: [usize; 2]) -> Vec<f32> {
        let block = rows.len() / (a * b);
        let blocks = (0..b).flat_map(|j| (0..a).map(move |i| i * b + j));
        let parts: Vec<&[f32]> = blocks.map(|n| &rows[n * block..(n + 1) * block]).collect();
        parts.concat()
    }

    /// Experts over rows that lie expert after expert, as many for each.
    fn run(&self, layer: &Layer, rows: &[f32]) -> Result<Vec<f32>> {
        let count = rows.len() / self.width;
        let each = count / layer.spec().shape.experts;
        let ids: Vec<i32> = (0..count).map(|row| (row / each) as i32).collect();
        let weights = vec![1.0f32; count];
        let input = Input::new(count, rows).with_routing(1, &ids, &weights);
        let output = layer.forward(&input)?;
        Ok(output.get("y").ok_or("the layer has no y")?.to_f32())
    }

    /// Equal parts, directly.
    fn exchange(&self, world: &mut Communicator, rows: &[f32]) -> Result<Vec<f32>> {
        let bytes = size_of_val(rows);
        let room = || -> Result<Slice> {
            let buffer = Arc::new(self.device.alloc(bytes)?);
            Ok(Slice::new(&buffer, Element::F32, 0, rows.len())?)
        };
        let (input, output) = (room()?, room()?);
        self.device
            .upload(bytemuck::cast_slice(rows), input.buffer(), 0)?;
        let call = Call::new("one-hot rows");
        let exchange = world.all_to_all(&input, &output, Algorithm::Direct, &call)?;
        exchange.wait()?;
        let mut came = vec![0.0f32; rows.len()];
        let bytes = bytemuck::cast_slice_mut(&mut came);
        self.device.download(output.buffer(), 0, bytes)?;
        Ok(came)
    }
}
