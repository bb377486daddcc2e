//! Gradients of the router: renormalization, gathering, scores, logits.

use super::{Pass, add, all_zero, dot};
use crate::choice::{guided, guided_back};
use crate::formula::formula_back;
use crate::gate::{considered, gather, mixer, relative};
use crate::gate::{slope_of_log, underflows};
use crate::math::{sigmoid, softmax, softplus};
use crate::noise::{deviate, noise_logits};
use crate::norm::{denominator, denominator_slopes};
use crate::router_input::{input_factors, router_input};
use crate::scores::scores_row;
use crate::{GateOutput, LossValue, Routed};
use moesaic_spec::{Chooser, LayerSpec, RouterInput, Score, Select};

impl Pass<'_> {
    /// Propagates the gradient of the gate's weights to the router's tensors and x.
    pub(super) fn gate(&mut self, gate: &GateOutput) {
        if !self.spec.has_logits() && !self.spec.router.expert_scale {
            return;
        }
        // The gradient of the weights goes to the caller, who made them.
        if self.spec.router.kind.chooser() == Chooser::Caller {
            return;
        }
        let (k, experts) = (self.spec.shape.top_k, self.spec.routed_experts());
        let losses = self.losses(gate);
        for t in 0..self.input.tokens {
            let ids = &gate.decision.ids[t * k..(t + 1) * k];
            let logits = gate.logits.as_ref().map(|z| &z[t * experts..][..experts]);
            let dweights = self.gradients.topk_weights[t * k..(t + 1) * k].to_vec();
            let clean = gate.clean.as_ref().map(|z| &z[t * experts..][..experts]);
            self.gate_row(t, ids, [logits, clean], &dweights, losses.as_ref());
        }
    }

    /// Returns the auxiliary losses with their coefficients.
    fn losses(&self, gate: &GateOutput) -> Option<LossValue> {
        let (false, Some(logits), Some(clean)) =
            (self.spec.losses.is_empty(), &gate.logits, &gate.clean)
        else {
            return None;
        };
        let routed = Routed {
            spec: self.spec,
            logits,
            clean,
            noise_scale: gate.noise_scale.as_deref(),
            ids: &gate.decision.ids,
            input: self.input,
        };
        Some(routed.total())
    }

    fn gate_row(
        &mut self,
        t: usize,
        ids: &[i32],
        [logits, clean]: [Option<&[f64]>; 2],
        dweights: &[f64],
        losses: Option<&LossValue>,
    ) {
        let from_weights = self.weights_back(ids, logits, dweights);
        let Some(mut dlogits) = from_weights else {
            return;
        };
        if let Some(losses) = losses {
            let row = t * dlogits.len()..(t + 1) * dlogits.len();
            add(&mut dlogits, &losses.dlogits[row], 1.0);
        }
        if let (Some(cap), Some(clean)) = (self.spec.router.logit_softcap, clean) {
            // A logit without a gradient has none before the cap either, even if it is NaN.
            let capped = dlogits.iter_mut().zip(clean).filter(|(d, _)| **d != 0.0);
            capped.for_each(|(d, z)| *d *= 1.0 - (z / cap).powi(2));
        }
        self.gradients.logits.extend(&dlogits);
        self.logits_back(t, &dlogits, losses);
    }

    /// Propagates the gradient of a token's weights to its logits. A token without computed experts
    /// gets zeros whatever its logits are, since 0 · NaN would be NaN.
    fn weights_back(
        &mut self,
        ids: &[i32],
        logits: Option<&[f64]>,
        dweights: &[f64],
    ) -> Option<Vec<f64>> {
        // Skip the chain rule: 0 · NaN would turn a padded token into NaN.
        if all_zero(dweights) {
            return logits.map(|logits| vec![0.0; logits.len()]);
        }
        // Selection and scores saw guided logits, so go back through them first.
        let guided = match logits {
            Some(logits) => guided(self.spec, self.weights, logits),
            None => vec![0.0; self.spec.routed_experts()],
        };
        let scores = self.scores(&guided);
        let tiny = logits.is_some() && underflows(self.spec, &scores, ids);
        let chosen = match self.spec.router.select {
            Select::SparseMixer(eps) => mixer(&guided, ids, eps).0,
            _ if tiny => relative(self.spec, &guided, ids),
            _ => gather(self.spec, &scores, ids),
        };
        let dchosen = self.finish(ids, &chosen, dweights);
        let logits = logits?;
        let dguided = match self.spec.router.select {
            Select::SparseMixer(eps) => mixer_back(&guided, ids, eps, &dchosen),
            _ if tiny => relative_back(self.spec, logits.len(), ids, &chosen, &dchosen),
            _ => self.score_back(&guided, ids, &chosen, &dchosen),
        };
        Some(guided_back(self.spec, logits, &dguided))
    }

    fn scores(&self, logits: &[f64]) -> Vec<f64> {
        if self.spec.has_logits() {
            scores_row(self.spec, logits)
        } else {
            vec![1.0; logits.len()]
        }
    }

    /// Runs renormalization, scale and learned factors backward.
    fn finish(&mut self, ids: &[i32], chosen: &[f64], dweights: &[f64]) -> Vec<f64> {
        let (r, weights) = (&self.spec.router, self.weights);
        let (norm, slopes) = (denominator(r, chosen), denominator_slopes(r, chosen));
        let factor = |e: i32| {
            if r.expert_scale {
                weights.get("router.expert_scale").data[e as usize]
            } else {
                1.0
            }
        };
        let live = |i: &usize| ids[*i] >= 0;
        // The gradient of score / denominator.
        let mut dratio = vec![0.0; ids.len()];
        for i in (0..ids.len()).filter(live) {
            dratio[i] = dweights[i] * r.scale * factor(ids[i]);
        }
        if r.expert_scale {
            for i in (0..ids.len()).filter(live) {
                let weight = chosen[i] / norm * r.scale;
                self.of("router.expert_scale")[ids[i] as usize] += dweights[i] * weight;
            }
        }
        // The gradient of the denominator, which every chosen score shares.
        let dvalue = -dot(&dratio, chosen) / (norm * norm);
        // A masked slot has no score and no share in the denominator.
        let of = |i: usize| match considered(ids[i]) {
            -1 => 0.0,
            _ => dratio[i] / norm + dvalue * slopes[i],
        };
        (0..ids.len()).map(of).collect()
    }

    /// Propagates gradients from chosen scores to logits.
    fn score_back(&self, logits: &[f64], ids: &[i32], chosen: &[f64], dchosen: &[f64]) -> Vec<f64> {
        // A dropped second expert still has its score in the denominator, so it has a gradient.
        let ids: Vec<i32> = ids.iter().map(|&id| considered(id)).collect();
        let mut d = vec![0.0; logits.len()];
        let live = (0..ids.len()).filter(|&i| ids[i] >= 0);
        if self.spec.router.score == Score::SoftmaxSelected {
            let mean = dot(chosen, dchosen);
            live.for_each(|i| d[ids[i] as usize] += chosen[i] * (dchosen[i] - mean));
            return d;
        }
        live.for_each(|i| d[ids[i] as usize] += dchosen[i]);
        match self.spec.router.score {
            Score::Softmax => softmax_back(&softmax(logits), &d),
            Score::Sigmoid => zip(logits, &d, |z| sigmoid(z) * (1.0 - sigmoid(z))),
            Score::SqrtSoftplus => zip(logits, &d, |z| sigmoid(z) / (2.0 * softplus(z).sqrt())),
            Score::One | Score::SoftmaxSelected => vec![0.0; logits.len()],
        }
    }

    /// Propagates gradients from logits to the router's tensors and the token. A token whose
    /// gradients are all zero adds nothing, even if it is NaN.
    fn logits_back(&mut self, t: usize, dlogits: &[f64], losses: Option<&LossValue>) {
        // A loss may have a gradient by the noise scale alone.
        let scales = |l: &LossValue| all_zero(&l.dscale[t * dlogits.len()..][..dlogits.len()]);
        if all_zero(dlogits) && losses.is_none_or(scales) {
            return;
        }
        if self.spec.router.bias {
            add(self.of("router.bias"), dlogits, 1.0);
        }
        let routed = router_input(self.spec, self.weights, self.input, t);
        let mut droute = formula_back(self.spec, self.of_weights(), &routed, dlogits);
        if let Some(dscales) = self.noise_back(t, &routed, dlogits, losses) {
            let part = self.linear_back("router.noise.weight", &routed, &dscales);
            add(&mut droute, &part, 1.0);
        }
        // The same draws as in the forward pass, since they depend on counters only.
        let factors = input_factors(self.spec, self.input, t);
        let x: Vec<f64> = self
            .token(t)
            .iter()
            .zip(&factors)
            .map(|(x, f)| x * f)
            .collect();
        if self.spec.router.input == RouterInput::RmsScaled {
            droute = self.rms_back(&x, &droute);
        }
        let dx: Vec<f64> = droute.iter().zip(&factors).map(|(d, f)| d * f).collect();
        self.add_to_token(t, &dx, 1.0);
    }

    /// Returns the gradient of the input a of the learned noise scale:
    /// `z = clean + noise · (softplus(a) + 1e-2) · deviate`. Losses over clean logits do not reach
    /// it through the noise; losses over the scale itself add to it.
    fn noise_back(
        &self,
        t: usize,
        x: &[f64],
        dlogits: &[f64],
        losses: Option<&LossValue>,
    ) -> Option<Vec<f64>> {
        if !self.spec.learned_noise() {
            return None;
        }
        let draw = self.input.draw;
        let of = |(e, (d, a)): (usize, (&f64, f64))| {
            let at = t * dlogits.len() + e;
            let (dclean, dscale) = losses.map_or((0.0, 0.0), |l| (l.dclean[at], l.dscale[at]));
            let deviate = draw.map_or(0.0, |draw| deviate(draw, t, e));
            ((d - dclean) * deviate + dscale) * self.spec.router.noise * sigmoid(a)
        };
        let scales = noise_logits(self.spec, self.weights, x);
        Some(dlogits.iter().zip(scales).enumerate().map(of).collect())
    }

    /// Runs `W · x` backward: adds the gradient of W, returns that of x.
    pub(super) fn linear_back(&mut self, name: &str, x: &[f64], dout: &[f64]) -> Vec<f64> {
        self.of_weights().linear_back(name, x, dout)
    }

    /// Runs `x / rms(x) · s / √d` backward: adds the gradient of s, returns that of x.
    fn rms_back(&mut self, x: &[f64], dout: &[f64]) -> Vec<f64> {
        let d = x.len() as f64;
        let rms = (dot(x, x) / d + 1e-6).sqrt();
        let scale = self.weights.get("router.input_scale").data.clone();
        let dscale: Vec<f64> = x
            .iter()
            .zip(dout)
            .map(|(v, g)| v / rms / d.sqrt() * g)
            .collect();
        add(self.of("router.input_scale"), &dscale, 1.0);
        let dunit: Vec<f64> = scale
            .iter()
            .zip(dout)
            .map(|(s, g)| s / d.sqrt() * g)
            .collect();
        let mut dx: Vec<f64> = dunit.iter().map(|g| g / rms).collect();
        add(&mut dx, x, -dot(&dunit, x) / (d * rms * rms * rms));
        dx
    }
}

/// Multiplies each gradient with the slope of its score. A score that nobody chose has no gradient,
/// whatever its value.
fn zip(logits: &[f64], d: &[f64], slope: impl Fn(f64) -> f64) -> Vec<f64> {
    let of = |(&z, &d): (&f64, &f64)| if d == 0.0 { 0.0 } else { slope(z) * d };
    logits.iter().zip(d).map(of).collect()
}

/// Runs [`relative`] backward. Its unit cancels in the denominator, so the unit has no gradient.
fn relative_back(
    spec: &LayerSpec,
    experts: usize,
    ids: &[i32],
    chosen: &[f64],
    dchosen: &[f64],
) -> Vec<f64> {
    let mut d = vec![0.0; experts];
    for ((&id, c), dc) in ids.iter().zip(chosen).zip(dchosen) {
        if let Ok(e) = usize::try_from(considered(id)) {
            d[e] += slope_of_log(spec.router.score) * c * dc;
        }
    }
    d
}

fn softmax_back(values: &[f64], d: &[f64]) -> Vec<f64> {
    let mean = dot(values, d);
    values.iter().zip(d).map(|(v, d)| v * (d - mean)).collect()
}

fn mixer_back(logits: &[f64], ids: &[i32], eps: f64, dchosen: &[f64]) -> Vec<f64> {
    let mut d = vec![0.0; logits.len()];
    let rows = mixer(logits, ids, eps).1;
    for ((row, &id), dweight) in rows
        .iter()
        .zip(ids)
        .zip(dchosen)
        .filter(|((_, id), _)| **id >= 0)
    {
        let mut done = vec![0.0; logits.len()];
        done[id as usize] = *dweight;
        add(&mut d, &softmax_back(row, &done), 1.0);
    }
    d
}
