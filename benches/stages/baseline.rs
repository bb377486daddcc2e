//! The layer of fairseq and DeepSpeed over ranks: one-hot products around an exchange of
//! equal parts.

use crate::Result;
use crate::one_hot::{Masks, OneHot, product};
use moesaic::collectives::{Algorithm, Call, Collectives, CommElement, Communicator, Slice};
use moesaic::target::Device;
use moesaic::{
    Engine, Input, Layer, LayerSpec, Output, RngKey, Saved, Tensor, Tensors, Training, reference,
};
use std::ops::Range;
use std::sync::Arc;

/// The order of received rows before experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Layout {
    /// `[ranks, experts, slots]`, as they came: a product for each expert and source.
    BySource,
    /// `[experts, ranks * slots]`: a product for each expert.
    ByExpert,
}

/// The state that forward keeps for backward.
struct Kept {
    gate: OneHot,
    masks: Masks,
    saved: Option<Saved>,
    /// The experts' outputs, `[experts, slots, width]`.
    back: Vec<f32>,
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
        trains: bool,
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
            let weights = repeated(weights, experts);
            Ok(if trains {
                engine.training_layer(&alone, &weights, Training::default())?
            } else {
                engine.layer(&alone, &weights)?
            })
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
        Ok(self.pass(world, x, layout, false)?.0)
    }

    /// `y` and `dx`, one after the other, of tokens and of `dy`; gradients of weights are made,
    /// and stay here.
    pub fn step(
        &self,
        world: &mut Communicator,
        [x, dy]: [&[f32]; 2],
        layout: Layout,
    ) -> Result<Vec<f32>> {
        let (y, kept) = self.pass(world, x, layout, true)?;
        let Kept {
            gate, masks, back, ..
        } = &kept;
        let (drows, dlogits) = gate.combine_backward(masks, back, dy, self.width);
        let came = self.exchange(world, &drows)?;
        let done = self.at_experts(layout, &came, |layer, dy| {
            let saved = kept.saved.as_ref().ok_or("a pass that trains")?;
            let rows = dy.len() / self.width;
            let dy = Tensor::new(&[rows, self.width], dy);
            named(&layer.backward(saved, &dy, false)?, "dx")
        })?;
        let drows = self.exchange(world, &done)?;
        let mut dx = gate.dispatch_backward(masks, &drows, self.width);
        let [tokens, width, experts] = [x.len() / self.width, self.width, self.experts];
        let through_router = product(
            (&dlogits, [experts, 1]),
            (&self.router, [width, 1]),
            [tokens, experts, width],
        );
        dx.iter_mut()
            .zip(through_router)
            .for_each(|(sum, own)| *sum += own);
        // What an optimizer of the router would take.
        std::hint::black_box(product(
            (&dlogits, [1, experts]),
            (x, [width, 1]),
            [experts, tokens, width],
        ));
        Ok([y, dx].concat())
    }

    fn pass(
        &self,
        world: &mut Communicator,
        x: &[f32],
        layout: Layout,
        trains: bool,
    ) -> Result<(Vec<f32>, Kept)> {
        let logits = product(
            (x, [self.width, 1]),
            (&self.router, [1, self.width]),
            [x.len() / self.width, self.width, self.experts],
        );
        let gate = OneHot::new(&logits, self.experts);
        let masks = gate.masks();
        let rows = gate.dispatch(&masks, x, self.width);
        let came = self.exchange(world, &rows)?;
        let mut saved = None;
        let done = self.at_experts(layout, &came, |layer, rows| {
            let (ids, weights) = self.routing(layer, rows);
            let input = Input::new(ids.len(), rows).with_routing(1, &ids, &weights);
            if !trains {
                return named(&layer.forward(&input)?, "y");
            }
            let (output, kept) = layer.forward_train(input.reading(&["y"]), RngKey::default())?;
            saved = Some(kept);
            named(&output, "y")
        })?;
        let back = self.exchange(world, &done)?;
        let y = gate.combine(&masks, &back, self.width);
        let kept = Kept {
            gate,
            masks,
            saved,
            back,
        };
        Ok((y, kept))
    }

    /// Experts over rows that have come, from where and to where they lie by source.
    fn at_experts(
        &self,
        layout: Layout,
        came: &[f32],
        run: impl FnOnce(&Layer, &[f32]) -> Result<Vec<f32>>,
    ) -> Result<Vec<f32>> {
        match layout {
            Layout::BySource => run(&self.by_source, came),
            Layout::ByExpert => {
                let rows = self.turned(came, [self.ranks, self.own]);
                Ok(self.turned(&run(&self.by_expert, &rows)?, [self.own, self.ranks]))
            }
        }
    }

    /// `[a, b, slots, width]` as `[b, a, slots, width]`.
    fn turned(&self, rows: &[f32], [a, b]: [usize; 2]) -> Vec<f32> {
        let block = rows.len() / (a * b);
        let blocks = (0..b).flat_map(|j| (0..a).map(move |i| i * b + j));
        let parts: Vec<&[f32]> = blocks.map(|n| &rows[n * block..(n + 1) * block]).collect();
        parts.concat()
    }

    /// The expert of each row, as many for each, and weights of 1.
    fn routing(&self, layer: &Layer, rows: &[f32]) -> (Vec<i32>, Vec<f32>) {
        let count = rows.len() / self.width;
        let each = count / layer.spec().shape.experts;
        let ids = (0..count).map(|row| (row / each) as i32).collect();
        (ids, vec![1.0; count])
    }

    /// Equal parts, directly.
    fn exchange(&self, world: &mut Communicator, rows: &[f32]) -> Result<Vec<f32>> {
        let bytes = size_of_val(rows);
        let room = || -> Result<Slice> {
            let buffer = Arc::new(self.device.alloc(bytes)?);
            Ok(Slice::new(&buffer, CommElement::F32, 0, rows.len())?)
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

/// A tensor of a pass.
pub fn named(output: &Output, name: &str) -> Result<Vec<f32>> {
    let tensor = output
        .get(name)
        .ok_or_else(|| format!("a pass has no {name}"))?;
    Ok(tensor.to_f32())
}
