//! Experts behind several routers, in one pass over their weights.
//!
//! Each router decides by itself. Then the tokens of all routers are one call of a layer with
//! external routing, in which each router's tokens follow those of the one before. A router's tokens
//! are a slice of that layer's tensors, which the router's own launches read and write in place.
//! Backward does the same in reverse.
//!
//! If every token visits every expert whatever its router says (`top_k` is the number of experts,
//! as in MMoE), evaluation saves more: experts see each token once, and each router only sums their
//! outputs.

use crate::call::{Input, Output, RngKey};
use crate::device_layer::DeviceLayer;
use crate::error::EngineError;
use crate::launch::{Bound, Scalars};
use crate::memory::Workspace;
use crate::pass::Pass;
use crate::router::{Place, RouterSteps, addresses, decide};
use crate::training::DeviceSaved;
use moesaic_kernel::Size;
use moesaic_plan::TensorId;
use moesaic_spec::{LayerSpec, Select, WeightSite};
use moesaic_target::Buffer;
use moesaic_tensor::Tensor;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard};

/// The tensors of a router in the stack before the experts run.
const DECIDED: [&str; 3] = ["x", "topk_ids", "topk_weights"];

/// The further tensors of a router in the stack on the way back, besides those of shared experts.
const BACK: [&str; 6] = [
    "slot_rows",
    "grad.topk_weights",
    "drows",
    "dy",
    "drouted",
    "dx",
];

/// Routers' tokens begin at multiples of this: 16 bytes at least, in any type.
const ALIGN: usize = 8;

/// The experts, and the launches that are not a whole layer's.
pub(crate) struct Stack {
    experts: DeviceLayer,
    once: bool,
    /// An evaluation without the last launches, and these, which are a router's.
    up_to_out: Bound,
    combine: Bound,
    experts_backward: Bound,
    evaluate: RouterSteps,
    train: RouterSteps,
    back: RouterSteps,
    /// Memory for one router's decision, and for its way back.
    deciding: Mutex<Workspace>,
    returning: Mutex<Workspace>,
}

/// The tokens of each router in the stack.
struct Spans {
    each: Vec<Range<usize>>,
    /// The tokens of the stack, with those between two routers' that go to no expert.
    total: usize,
}

impl Spans {
    /// Lays the tokens of calls one behind another. Each begins at a multiple of [`ALIGN`].
    fn of(inputs: &[&Input<'_>]) -> Spans {
        let mut total = 0;
        let lay = |input: &&Input<'_>| {
            let span = total..total + input.tokens;
            total += input.tokens.next_multiple_of(ALIGN);
            span
        };
        Spans {
            each: inputs.iter().map(lay).collect(),
            total,
        }
    }

    /// Returns the tokens of one call, which all routers read.
    fn once(tokens: usize) -> Spans {
        Spans {
            each: std::iter::once(0..tokens).collect(),
            total: tokens,
        }
    }

    /// Returns the most tokens that a router has.
    fn most(&self) -> usize {
        self.each.iter().map(Range::len).max().unwrap_or(0)
    }

    /// Returns whether tokens lie between two routers' that are no router's.
    fn have_gaps(&self) -> bool {
        self.each.iter().map(Range::len).sum::<usize>() < self.total
    }

    /// Returns the rows of all routers, each at its tokens, with zeros between them.
    fn laid<'a>(&self, parts: impl Iterator<Item = &'a [u8]>, row: usize) -> Vec<u8> {
        let mut all = vec![0; self.total * row];
        for (span, part) in self.each.iter().zip(parts) {
            all[span.start * row..][..part.len()].copy_from_slice(part);
        }
        all
    }
}

/// The state that one forward pass keeps for backward.
pub(crate) struct StackSaved {
    spans: Spans,
    experts: DeviceSaved,
    routers: Vec<(Workspace, Scalars)>,
}

impl Stack {
    /// Makes a stack of layers like `router`, and of the layer of [`moesaic_plan::stacked`] over
    /// the same experts.
    ///
    /// # Errors
    /// When their steps cannot be bound.
    pub fn new(router: &DeviceLayer, experts: DeviceLayer) -> Result<Stack, EngineError> {
        let (plan, experts_plan) = (router.plan(), experts.plan());
        let once = sees_all(&plan.spec);
        let (evaluation, both) = (plan.evaluation_steps(), [router, &experts]);
        let combine = plan.combine_steps(evaluation, true);
        let decide = plan.router_steps(evaluation);
        let evaluate = if once {
            RouterSteps::new(both, decide, &combine, gives_each)?
        } else {
            RouterSteps::new(both, decide, &[], |name| DECIDED.contains(&name))?
        };
        let decide = plan.router_steps(&plan.steps);
        let train = RouterSteps::new(both, decide, &[], |name| DECIDED.contains(&name))?;
        let mut back = RouterSteps::new(both, &plan.router_backward(), &[], of_experts)?;
        // Backward finds these in the memory that the training pass kept, so a second copy would
        // stay unused.
        back.own.retain(|id| !train.own.contains(id));
        let up_to_out = experts_plan.combine_steps(experts_plan.evaluation_steps(), false);
        Ok(Stack {
            once,
            up_to_out: experts.bind(&up_to_out)?,
            combine: router.bind(&combine)?,
            experts_backward: experts.bind(&experts_plan.experts_backward())?,
            evaluate,
            train,
            back,
            experts,
            deciding: Mutex::default(),
            returning: Mutex::default(),
        })
    }

    /// Evaluates the layer of every router on the same tokens.
    pub fn forward(
        &self,
        routers: &[&DeviceLayer],
        input: &Input<'_>,
        names: &[&str],
    ) -> Result<Vec<Output>, EngineError> {
        routers[0].check_outputs(Pass::Evaluate, names)?;
        if self.once {
            self.forward_once(routers, input, names)
        } else {
            self.forward_stacked(routers, &vec![input; routers.len()], names)
        }
    }

    /// Returns whether every expert sees every token, so that an evaluation has one row for all
    /// routers.
    pub fn sees_all(&self) -> bool {
        self.once
    }

    /// Evaluates the layer of every router, each on its own tokens.
    pub fn forward_stacked(
        &self,
        routers: &[&DeviceLayer],
        inputs: &[&Input<'_>],
        names: &[&str],
    ) -> Result<Vec<Output>, EngineError> {
        routers[0].check_outputs(Pass::Evaluate, names)?;
        let spans = Spans::of(inputs);
        let total = spans.total;
        let mut workspaces = self.experts.lock_workspaces();
        let scalars = self.scalars(Pass::Evaluate, total)?;
        self.experts.reserve(&mut workspaces, total)?;
        self.experts.lay_passing(&mut workspaces);
        let find = |tensor| workspaces.get(tensor);
        self.stage(routers[0], inputs, &spans, find)?;
        let mut own = lock(&self.deciding);
        let steps = &self.evaluate;
        steps.reserve(&mut own, routers[0], spans.most())?;
        let mut outputs = Vec::new();
        for ((router, input), span) in routers.iter().zip(inputs).zip(&spans.each) {
            let place = |tensor| self.place(steps, tensor, span.start, find, &[&own]);
            let rng_key = RngKey::default();
            let decided = decide(router, steps, Pass::Evaluate, rng_key, input, names, place)?;
            outputs.push(decided.0);
        }
        let (experts, addresses) = (&self.experts, &workspaces.addresses);
        experts.run(experts.bound(Pass::Evaluate), &scalars, addresses, None)?;
        self.read_y(&mut outputs, names, &spans, find)?;
        Ok(outputs)
    }

    /// Does the same as [`Stack::forward_stacked`], where every token visits every expert.
    fn forward_once(
        &self,
        routers: &[&DeviceLayer],
        input: &Input<'_>,
        names: &[&str],
    ) -> Result<Vec<Output>, EngineError> {
        let (experts, tokens) = (&self.experts, input.tokens);
        let mut workspaces = experts.lock_workspaces();
        let scalars = self.scalars(Pass::Evaluate, tokens)?;
        experts.reserve(&mut workspaces, tokens)?;
        experts.lay_passing(&mut workspaces);
        let find = |tensor| workspaces.get(tensor);
        self.stage(routers[0], &[input], &Spans::once(tokens), find)?;
        let count = experts.spec().shape.experts;
        // Slot `e` of every token names expert `e`, so the rows of a token can be found by expert
        // below.
        let all: Vec<i32> = (0..tokens).flat_map(|_| 0..count as i32).collect();
        self.fill("topk_ids", bytemuck::cast_slice(&all), find)?;
        self.fill(
            "topk_weights",
            bytemuck::cast_slice(&vec![1f32; all.len()]),
            find,
        )?;
        experts.run(&self.up_to_out, &scalars, &workspaces.addresses, None)?;
        let rows = experts.read(&["slot_rows"], tokens, find)?;
        let rows: Vec<i32> = rows.tensors["slot_rows"].to_vec().expect("rows are i32");

        let steps = &self.evaluate;
        let mut own = lock(&self.deciding);
        steps.reserve(&mut own, routers[0], tokens)?;
        let place = |tensor| self.place(steps, tensor, 0, find, &[&own]);
        let mut outputs = Vec::new();
        for router in routers {
            let (pass, rng_key) = (Pass::Evaluate, RngKey::default());
            let (mut output, scalars) = decide(router, steps, pass, rng_key, input, names, place)?;
            let ids = router.read(&["topk_ids"], tokens, |tensor| own.get(tensor))?;
            let ids: Vec<i32> = ids.tensors["topk_ids"].to_vec().expect("ids are i32");
            // The stack's slots are in the order of experts, the router's in the order of its
            // scores. Combine adds in the order of slots, and so must have the router's order to
            // give the same bytes as the router's own layer.
            let of_token = rows.chunks(count).zip(ids.chunks(count));
            let found = of_token.flat_map(|(rows, ids)| ids.iter().map(|&id| rows[id as usize]));
            let found: Vec<i32> = found.collect();
            let slot_rows = router.id("slot_rows").and_then(place);
            let slot_rows = slot_rows.expect("reserved above").buffer;
            experts
                .device
                .upload(bytemuck::cast_slice(&found), slot_rows, 0)?;
            router.run(&self.combine, &scalars, &addresses(router, place), None)?;
            if names.contains(&"y") {
                let y = router.read(&["y"], tokens, |tensor| own.get(tensor))?;
                output.tensors.extend(y.tensors);
            }
            outputs.push(output);
        }
        Ok(outputs)
    }

    /// Runs [`DeviceLayer::forward_train`] for every router, on its own tokens.
    pub fn forward_train(
        &self,
        routers: &[&DeviceLayer],
        inputs: &[&Input<'_>],
        names: &[&str],
        rng_key: RngKey,
    ) -> Result<(Vec<Output>, StackSaved), EngineError> {
        routers[0].check_outputs(Pass::Train, names)?;
        let (spans, layer) = (Spans::of(inputs), &self.experts);
        let total = spans.total;
        let workspaces = &mut *layer.lock_workspaces();
        let scalars = self.scalars(Pass::Train, total)?;
        layer.reserve_training(&mut workspaces.every, total)?;
        let experts = layer.saved(total, scalars)?;
        layer.lay_saved(workspaces, &experts);
        let find = |tensor| experts.get(tensor).or_else(|| workspaces.every.get(tensor));
        self.stage(routers[0], inputs, &spans, find)?;
        let steps = &self.train;
        let (mut outputs, mut kept) = (Vec::new(), Vec::new());
        for ((router, input), span) in routers.iter().zip(inputs).zip(&spans.each) {
            // Memory for each router: all of them run forward before the first runs backward.
            let mut own = Workspace::default();
            steps.reserve(&mut own, router, span.len())?;
            let place = |tensor| self.place(steps, tensor, span.start, find, &[&own]);
            let (output, scalars) =
                decide(router, steps, Pass::Train, rng_key, input, names, place)?;
            outputs.push(output);
            kept.push((own, scalars));
        }
        let steps = layer.bound(Pass::Train);
        layer.run(steps, &scalars, &workspaces.addresses, None)?;
        self.read_y(&mut outputs, names, &spans, find)?;
        let saved = StackSaved {
            spans,
            experts,
            routers: kept,
        };
        Ok((outputs, saved))
    }

    /// Runs [`DeviceLayer::backward`] for every router. Gradients of experts are the sum over the
    /// routers.
    pub fn backward(
        &self,
        routers: &[&DeviceLayer],
        saved: &StackSaved,
        dy: &[Tensor<'_>],
        accumulate: bool,
    ) -> Result<Vec<Output>, EngineError> {
        let layer = &self.experts;
        layer.check_saved(&saved.experts)?;
        let spans = &saved.spans;
        let workspaces = &mut *layer.lock_workspaces();
        layer.reserve_every(&mut workspaces.every, spans.total)?;
        layer.gradient_buffers()?;
        layer.lay_saved(workspaces, &saved.experts);
        let kept = &saved.experts;
        let find = |tensor| kept.get(tensor).or_else(|| workspaces.every.get(tensor));
        for ((router, dy), span) in routers.iter().zip(dy).zip(&spans.each) {
            router.check_dy(span.len(), dy)?;
        }
        let row = layer.plan().tensor("dy").expect("training plans have dy");
        let each = dy.iter().map(|dy| &*dy.data);
        self.fill("dy", &spans.laid(each, row.bytes(1) as usize), find)?;
        let scalars = saved.experts.scalars().accumulating(accumulate);
        let addresses_of_all = &workspaces.addresses;
        layer.run(&self.experts_backward, &scalars, addresses_of_all, None)?;

        let mut outputs = Vec::new();
        let calls = routers.iter().zip(&saved.routers).zip(&spans.each);
        for ((router, (own, scalars)), span) in calls {
            router.gradient_buffers()?;
            // One router after the other uses this memory, in stream order.
            let mut returning = lock(&self.returning);
            let steps = &self.back;
            steps.reserve(&mut returning, router, spans.most())?;
            let memory = [own, &*returning];
            let place = |tensor| self.place(steps, tensor, span.start, find, &memory);
            let scalars = scalars.accumulating(accumulate);
            router.run(&steps.bound, &scalars, &addresses(router, place), None)?;
            let mut output = Output::default();
            for name in router.input_gradients() {
                let tensor = router.id(name).expect("it is the plan's");
                let lies = place(tensor).expect("backward wrote it");
                let host = router.read_at(tensor, span.len(), lies)?;
                output.tensors.insert(name.to_string(), host);
            }
            outputs.push(output);
        }
        Ok(outputs)
    }

    /// Returns the stack's scalars: it draws nothing.
    fn scalars(&self, pass: Pass, tokens: usize) -> Result<Scalars, EngineError> {
        let rng_key = RngKey::default();
        self.experts.scalars(pass, rng_key, tokens, None)
    }

    /// Puts the tokens of each router's call into the stack, with zeros that go to no expert
    /// between them.
    fn stage<'b>(
        &self,
        router: &DeviceLayer,
        inputs: &[&Input<'_>],
        spans: &Spans,
        find: impl Fn(TensorId) -> Option<&'b Buffer>,
    ) -> Result<(), EngineError> {
        let tensor = router.plan().tensor("x").expect("a layer has tokens");
        let each = inputs
            .iter()
            .map(|input| router.checked_input(input, tensor));
        let each = each.collect::<Result<Vec<_>, _>>()?;
        let rows = each.iter().map(|x| &*x.data);
        self.fill("x", &spans.laid(rows, tensor.bytes(1) as usize), &find)?;
        if spans.have_gaps() {
            // Between the tokens of two routers lies what an earlier call left there. Ids of -1
            // keep it from every expert.
            let slots = spans.total * router.spec().shape.top_k;
            self.fill("topk_ids", bytemuck::cast_slice(&vec![-1i32; slots]), &find)?;
            self.fill(
                "topk_weights",
                bytemuck::cast_slice(&vec![0f32; slots]),
                &find,
            )?;
        }
        Ok(())
    }

    fn fill<'b>(
        &self,
        name: &str,
        bytes: &[u8],
        find: impl Fn(TensorId) -> Option<&'b Buffer>,
    ) -> Result<(), EngineError> {
        let id = self.experts.id(name);
        let buffer = id.and_then(find).expect("the stack has it");
        Ok(self.experts.device.upload(bytes, buffer, 0)?)
    }

    /// Returns a router's part of a stack's tensor, given the router's first token; the whole
    /// tensor if it has no row per token.
    fn slice<'b>(
        &self,
        id: TensorId,
        first: usize,
        find: impl Fn(TensorId) -> Option<&'b Buffer>,
    ) -> Option<Place<'b>> {
        let tensor = &self.experts.plan()[id];
        let offset = match tensor.shape.first() {
            Some(Size::Tokens) => tensor.bytes(first as u64) as usize,
            _ => 0,
        };
        let buffer = find(id)?;
        Some(Place { buffer, offset })
    }

    /// Returns the place of a router's tensor: in the stack, from its first token on, or in memory
    /// of its own.
    fn place<'f: 'b, 'b>(
        &self,
        steps: &RouterSteps,
        tensor: TensorId,
        first: usize,
        find: impl Fn(TensorId) -> Option<&'f Buffer>,
        own: &[&'b Workspace],
    ) -> Option<Place<'b>> {
        match steps.stacked(tensor) {
            Some(there) => self.slice(there, first, find),
            None => {
                let buffer = own.iter().find_map(|memory| memory.get(tensor))?;
                Some(Place { buffer, offset: 0 })
            }
        }
    }

    /// Adds `y` to what routers gave, where it is wanted.
    fn read_y<'b>(
        &self,
        outputs: &mut [Output],
        names: &[&str],
        spans: &Spans,
        find: impl Fn(TensorId) -> Option<&'b Buffer>,
    ) -> Result<(), EngineError> {
        if !names.contains(&"y") {
            return Ok(());
        }
        let id = self.experts.id("y").expect("a layer has y");
        for (output, span) in outputs.iter_mut().zip(&spans.each) {
            let lies = self.slice(id, span.start, &find).expect("reserved");
            let y = self.experts.read_at(id, span.len(), lies)?;
            output.tensors.insert("y".to_string(), y);
        }
        Ok(())
    }
}

/// Returns whether experts that see every token compute a tensor for all routers at once.
fn gives_each(name: &str) -> bool {
    ["x", "out"].contains(&name) || name.starts_with("shared.")
}

/// Returns whether a tensor of the way back is the stack's.
fn of_experts(name: &str) -> bool {
    DECIDED.contains(&name) || BACK.contains(&name) || name.starts_with("shared.")
}

/// Returns whether every expert sees every token whatever the router says, with outputs that do not
/// depend on the router either.
fn sees_all(spec: &LayerSpec) -> bool {
    let router = &spec.router;
    // Each of these makes an expert's output, or whether it exists, depend on the router: then one
    // row cannot serve all routers.
    spec.shape.top_k == spec.routed_experts()
        && spec.experts.identity + spec.experts.zero == 0
        && router.weight_on == WeightSite::Output
        && !matches!(router.select, Select::ExpertChoice(_))
        && !router.token_mask
        && !router.active_k
}

fn lock(workspace: &Mutex<Workspace>) -> MutexGuard<'_, Workspace> {
    let locked = workspace.lock();
    locked.unwrap_or_else(|poisoned| poisoned.into_inner())
}
