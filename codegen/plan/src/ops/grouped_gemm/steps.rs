//! The GEMMs of a pass, forward and backward, of routed and shared experts.

use super::{ExpertGemm, GroupedGemmDesc, GroupedGemmDgradDesc, GroupedGemmWgradDesc};
use super::{desc, dgrad, wgrad};
use crate::Knob;
use crate::layer::{Bind, Builder, Part, TensorRole, borrowed, constant, owned, tensor};
use crate::ops::{Calls, Op};
use moesaic_kernel::DType;

impl Builder {
    /// Returns the rows of a row tile of the routed experts' GEMMs.
    pub(crate) fn tile_rows(&self) -> usize {
        let up = self.routed(ExpertGemm::Up);
        let measured = self.plan.tuning.size(Knob::TileRows);
        measured.unwrap_or_else(|| self.tiling(&up).tile_rows)
    }

    /// Adds the routed experts, from tokens to the output of each row.
    pub(crate) fn experts(&mut self) {
        let [up, down] =
            [ExpertGemm::Up, ExpertGemm::Down].map(|half| self.tiling(&self.routed(half)));
        debug_assert_eq!(up.tile_rows, down.tile_rows, "one list of row tiles");
        self.latent_down();
        if !up.gather() && !self.rows_given() {
            // A decode kernel that gathers reads x itself, so only larger calls need copies of
            // rows.
            let decode = self.decode(&self.routed(ExpertGemm::Up));
            self.dispatch(if decode.is_some_and(|config| config.gather()) {
                Calls::Prefill
            } else {
                Calls::All
            });
        }
        self.expert_gemm("grouped_gemm_up", ExpertGemm::Up, None, self.keeps_hidden());
        self.expert_gemm("grouped_gemm_down", ExpertGemm::Down, None, false);
    }

    /// Returns whether rows are in place when the experts begin.
    fn rows_given(&self) -> bool {
        matches!(self.part, Part::Experts { .. })
    }

    /// Returns a GEMM of the routed experts. Rows of other ranks' tokens arrive in order, so they
    /// are not read from x.
    pub(super) fn routed(&self, half: ExpertGemm) -> GroupedGemmDesc {
        let desc = desc::routed(&self.plan.spec, half);
        GroupedGemmDesc {
            plain_rows: desc.plain_rows && !self.rows_given(),
            ..desc
        }
    }

    /// Adds a GEMM of the routed experts, or of a shared one.
    pub(crate) fn expert_gemm(
        &mut self,
        name: &str,
        half: ExpertGemm,
        shared: Option<usize>,
        keep: bool,
    ) {
        let spec = &self.plan.spec;
        let desc = match shared {
            None => self.routed(half),
            Some(index) => desc::shared(spec, half, index),
        };
        let desc = GroupedGemmDesc { keep, ..desc };
        let owner = shared.map_or("experts".to_string(), |i| format!("shared.{i}"));
        let packed = packed_name(&owner, half);
        let names = self.expert_names(shared);
        let fused_shared = match shared {
            None => self.fused_shared(half),
            // Its tiles are in the launch of the routed experts already.
            Some(0) if self.has_fused_shared(half) => return,
            Some(_) => None,
        };
        self.gemm(
            name,
            GroupedGemmDesc {
                fused_shared,
                ..desc
            },
            names,
            packed,
        );
    }

    /// Adds a GEMM whose matrices may be packed. Where a machine has decode kernels, it adds two
    /// kernels, each for its calls.
    pub(super) fn gemm(
        &mut self,
        name: &str,
        desc: GroupedGemmDesc,
        mut names: Vec<(String, String)>,
        packed: String,
    ) {
        let calls = match self.decode(&desc) {
            Some(config) => {
                self.decode_gemm(name, desc.clone(), config, &names);
                Calls::Prefill
            }
            None => Calls::All,
        };
        names.push(("packed".to_string(), packed.clone()));
        let bind = borrowed(&names);
        let op = self.tiled(desc);
        let kernel = self.kernel_for(name, op, calls);
        let product = self.plan.kernels[kernel].entries.len() - 1;
        // Evaluation, and a backward pass that computes again, read the panels that training packs.
        let is_packed = self.plan.tensors.iter().any(|t| t.name == packed);
        if !is_packed {
            for index in 0..product {
                let pack = self.step_of(kernel, index, &bind);
                self.plan.prepare.push(pack);
            }
            self.declare_packed(kernel, &packed);
        }
        self.step(kernel, product, &bind);
    }

    /// Declares the packed weights of a GEMM, if it has any.
    fn declare_packed(&mut self, kernel: usize, name: &str) {
        if let Op::GroupedGemm { desc, config } = &self.plan.kernels[kernel].op
            && config.packed()
        {
            let shape = desc.packed_shape(config).map(constant);
            let dtype = desc.format.map_or(desc.weights, |_| DType::I32);
            let packed = tensor(name, dtype, &shape, TensorRole::Packed);
            self.plan.tensors.push(packed);
        }
    }

    /// Adds a shared expert and its gate.
    pub(crate) fn shared(&mut self, index: usize) {
        self.shared_gemms(index);
        self.shared_gate(index);
    }

    /// Adds a shared expert without its gate.
    pub(crate) fn shared_gemms(&mut self, index: usize) {
        let up = format!("grouped_gemm_up_shared_{index}");
        self.expert_gemm(&up, ExpertGemm::Up, Some(index), self.keeps_hidden());
        let down = format!("grouped_gemm_down_shared_{index}");
        self.expert_gemm(&down, ExpertGemm::Down, Some(index), false);
    }

    /// Adds the backward GEMMs of the routed experts, or of a shared one.
    pub(crate) fn expert_bwd(&mut self, shared: Option<usize>, has_rows: &mut bool) {
        let spec = self.plan.spec.clone();
        let suffix = shared.map_or(String::new(), |i| format!("_shared_{i}"));
        let names = self.expert_names(shared);
        let bind = borrowed(&names);
        let dgrad = |half| match shared {
            None => dgrad::routed(&spec, half),
            Some(i) => dgrad::shared(&spec, half, i),
        };
        let given = self.rows_given();
        let wgrad = |half| match shared {
            None if given => GroupedGemmWgradDesc {
                plain_rows: false,
                ..wgrad::routed(&spec, half)
            },
            None => wgrad::routed(&spec, half),
            Some(i) => wgrad::shared(&spec, half, i),
        };
        let name = |stem: &str| format!("grouped_gemm_{stem}{suffix}");
        let frozen = shared.is_none() && self.frozen;
        // First, because all the others read its results: `hidden` for the gradient of down,
        // `dgate` and `dup` for both GEMMs of up.
        self.dgrad(&name("dgrad_down"), dgrad(ExpertGemm::Down), &names);
        self.wgrad(&name("wgrad_down"), wgrad(ExpertGemm::Down), frozen, &bind);
        self.dgrad(&name("dgrad_up"), dgrad(ExpertGemm::Up), &names);
        let up = wgrad(ExpertGemm::Up);
        // Of these GEMMs only the gradient of up reads rows, and only a family that cannot gather
        // them from x wants copies.
        if shared.is_none() && !frozen && !self.tiling(&up).gather() && !*has_rows {
            self.dispatch_again();
            *has_rows = true;
        }
        self.wgrad(&name("wgrad_up"), up, frozen, &bind);
    }

    /// Adds the gradients of a half's inputs, of routed experts also from the forward pass's panels
    /// of codes.
    fn dgrad(&mut self, name: &str, desc: GroupedGemmDgradDesc, names: &[(String, String)]) {
        // Shared experts are never codes, so their kernels have no parameter of this name.
        let packed = packed_name("experts", desc.half);
        let mut bind = borrowed(names);
        bind.push(("packed", &packed));
        self.launch(name, desc, &bind);
    }

    /// Adds the gradients of a half's matrices and biases; those of biases alone where the matrices
    /// are `frozen`.
    fn wgrad(&mut self, name: &str, desc: GroupedGemmWgradDesc, frozen: bool, bind: Bind) {
        if !frozen {
            self.launch(name, desc, bind);
        } else if desc.bias {
            let kernel = self.kernel(name, desc);
            // The entry of the bias is the last of a wgrad.
            let bias = self.plan.kernels[kernel].entries.len() - 1;
            self.step(kernel, bias, bind);
        }
    }

    /// Returns the column tiles of a GEMM that leaves parts of the weight's gradient.
    pub(crate) fn parts(&self, desc: &GroupedGemmDgradDesc) -> usize {
        desc.outer.div_ceil(self.tiling(desc).tile_columns)
    }

    /// Returns [`Builder::parts`] of each shared expert.
    pub(crate) fn shared_parts(&self) -> Vec<usize> {
        if let Some(columns) = &self.sharded {
            return columns.clone();
        }
        let spec = &self.plan.spec;
        let indices = 0..spec.shared.len();
        indices
            .map(|i| self.parts(&dgrad::shared(spec, ExpertGemm::Down, i)))
            .collect()
    }

    /// Returns [`expert_names`] with the tensors at both ends of the routed experts.
    fn expert_names(&self, shared: Option<usize>) -> Vec<(String, String)> {
        let mut names = expert_names(shared);
        if shared.is_none() {
            names.extend(owned(&self.around()));
            let fused_shared = expert_names(Some(0)).into_iter();
            names.extend(fused_shared.map(|(from, to)| (format!("shared_{from}"), to)));
        }
        names
    }
}

/// Returns the name of the packed matrices of a half of experts.
fn packed_name(owner: &str, half: ExpertGemm) -> String {
    format!("{owner}.{}.packed", half.name())
}

/// Returns the tensors behind the parameters of the kernels of the routed experts, or of a shared
/// one, forward and backward.
fn expert_names(shared: Option<usize>) -> Vec<(String, String)> {
    let mut list = Vec::new();
    let mut add = |from: &str, to: String| list.push((from.to_string(), to));
    let prefix = shared.map_or("experts".to_string(), |i| format!("shared.{i}"));
    for part in ["gate", "up", "down"] {
        add(part, format!("{prefix}.{part}.weight"));
        for kind in ["scale", "scale_2", "offset", "offset_2"] {
            add(&format!("{part}_{kind}"), format!("{prefix}.{part}.{kind}"));
        }
        add(&format!("{part}_map"), format!("{prefix}.{part}.weight"));
        add(&format!("{part}_bias"), format!("{prefix}.{part}.bias"));
        add(
            &format!("grad_{part}"),
            format!("grad.{prefix}.{part}.weight"),
        );
        add(
            &format!("grad_{part}_bias"),
            format!("grad.{prefix}.{part}.bias"),
        );
    }
    let tokens = [("rows", "x"), ("dout", "dy")];
    for name in [
        "rows", "dout", "hidden", "out", "gate_pre", "up_pre", "dgate", "dup", "drows",
    ] {
        let as_token = tokens.iter().find(|(from, _)| *from == name);
        let to = match (shared, as_token) {
            (None, _) => name.to_string(),
            (Some(_), Some((_, token))) => token.to_string(),
            (Some(_), None) => format!("{prefix}.{name}"),
        };
        add(name, to.clone());
        add(&format!("{name}_map"), to);
    }
    if shared.is_some() {
        add("topk_weights", format!("{prefix}.weight"));
        add("dweight_parts", format!("{prefix}.dweight_parts"));
    }
    list
}
