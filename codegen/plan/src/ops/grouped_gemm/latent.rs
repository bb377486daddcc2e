//! The layers between the routed experts and the rest: projections, and a weight.
//!
//! With projections the layer inside them has the width of its experts and reads `latent.x` for x,
//! `latent.sum` for y, `latent.dsum` for dy and `latent.dx` for dx, so its kernels are the same
//! with these names. Norms between a projection and the experts have names of their own. A layer
//! whose routed experts have a weight reads `routed` for y and `drouted` for dy.

use super::{ExpertGemm, desc, dgrad, wgrad};
use crate::layer::{Bind, Builder, owned};
use crate::ops::rms_norm::read_by_projection;
use crate::ops::shared::adds_later;

/// The name of the kernel of the way down.
pub(crate) const DOWN: &str = "grouped_gemm_latent_down";

impl Builder {
    /// Returns the tokens, output and their gradients as the routed experts know them.
    pub(crate) fn around(&self) -> Vec<(&'static str, &'static str)> {
        let latent = [
            ("x", "latent.x"),
            ("y", "latent.sum"),
            ("dy", "latent.dsum"),
            ("dx", "latent.dx"),
        ];
        match &self.plan.spec {
            spec if spec.latent.is_some() => latent.to_vec(),
            spec if spec.residual().is_some() => vec![("y", "routed"), ("dy", "drouted")],
            _ => vec![],
        }
    }

    pub(crate) fn latent_down(&mut self) {
        if self.plan.spec.latent.is_some() {
            let [to, _] = self.written_by_projection();
            self.project(DOWN, ExpertGemm::Down, "x", to);
            self.input_norm();
        }
    }

    pub(crate) fn latent_up(&mut self) {
        if self.plan.spec.latent.is_some() {
            let to = if adds_later(&self.plan.spec) {
                "routed"
            } else {
                "y"
            };
            self.latent_norm();
            let [from, _] = read_by_projection(&self.plan.spec);
            self.project("grouped_gemm_latent_up", ExpertGemm::Up, from, to);
        }
    }

    fn project(&mut self, name: &str, way: ExpertGemm, from: &str, to: &str) {
        let matrix = format!("latent.{}", way.name());
        let (weight, bias) = (format!("{matrix}.weight"), format!("{matrix}.bias"));
        let names = [
            ("hidden", from),
            ("hidden_map", from),
            ("down", &weight),
            ("down_map", &weight),
            ("down_bias", &bias),
            ("out", to),
        ];
        let desc = desc::latent(&self.plan.spec, way);
        self.gemm(name, desc, owned(&names), format!("{matrix}.packed"));
    }

    /// Adds the steps from dy to the gradient of the routed experts' sum.
    pub(crate) fn latent_up_bwd(&mut self) {
        if self.plan.spec.latent.is_some() {
            let dout = match self.plan.spec.residual() {
                Some(_) => "drouted",
                None => "dy",
            };
            let [read, gradient] = read_by_projection(&self.plan.spec);
            self.project_bwd(ExpertGemm::Up, dout, read, gradient);
            self.latent_norm_bwd();
        }
    }

    /// Adds the steps from the gradient of the routed experts' input to that of tokens.
    pub(crate) fn latent_down_bwd(&mut self) {
        if self.plan.spec.latent.is_some() {
            self.input_norm_bwd();
            let [_, dout] = self.written_by_projection();
            self.project_bwd(ExpertGemm::Down, dout, "x", "latent.drows");
        }
    }

    fn project_bwd(&mut self, way: ExpertGemm, dout: &str, rows: &str, drows: &str) {
        let (matrix, name) = (format!("latent.{}", way.name()), way.name());
        let weight = format!("{matrix}.weight");
        let (grad, grad_bias) = (format!("grad.{weight}"), format!("grad.{matrix}.bias"));
        let wgrad = wgrad::latent(&self.plan.spec, way);
        let factor = if wgrad.clears { "latent.rows" } else { rows };
        let bind: Bind = &[
            ("dup", dout),
            ("dup_map", dout),
            ("up", &weight),
            ("up_map", &weight),
            ("drows", drows),
            ("given", rows),
            ("rows", factor),
            ("rows_map", factor),
            ("grad_up", &grad),
            ("grad_up_bias", &grad_bias),
        ];
        let dgrad = dgrad::latent(&self.plan.spec, way);
        let kernel = |pass: &str| format!("grouped_gemm_{pass}_latent_{name}");
        self.launch(&kernel("dgrad"), dgrad, bind);
        self.launch(&kernel("wgrad"), wgrad, bind);
    }
}
