//! The steps of a rank as text.

use super::data::NODES;
use super::{CollectiveOp, Exchange, PlanPart, RankPlan, RankStep};
use crate::{LayerPlan, Step, TensorId};
use std::fmt::Write;

impl RankPlan {
    /// Returns the steps of every pass, one line each: the kernel that is launched, or the
    /// exchange.
    pub fn text(&self) -> String {
        let mut text = String::new();
        type Launched = fn(&LayerPlan) -> &[Step];
        let passes: [(&str, &[RankStep], Launched); 3] = [
            ("forward", &self.steps, |plan| &plan.steps),
            ("evaluation", &self.evaluation, |plan| &plan.evaluation),
            ("backward", &self.backward, |plan| &plan.backward),
        ];
        for (name, steps, launched) in passes {
            if steps.is_empty() {
                continue;
            }
            let _ = writeln!(text, "{name}");
            for step in steps {
                let (lines, chunk) = match step {
                    RankStep::Launch { part, step, chunk } => {
                        let launched = &launched(self.part(*part))[*step];
                        (vec![self.launch(*part, launched)], chunk)
                    }
                    RankStep::Exchange(exchange) => {
                        (self.exchange_lines(exchange), &exchange.chunk)
                    }
                };
                let chunk = chunk.map_or(String::new(), |chunk| format!(", chunk {chunk}"));
                for line in lines {
                    let _ = writeln!(text, "  {line}{chunk}");
                }
            }
        }
        text
    }

    fn launch(&self, part: PlanPart, step: &Step) -> String {
        let name = part.name();
        format!("{name:<9}{}", self.part(part).symbol(step))
    }

    /// Returns the line of an exchange, between the launches that cast its rows for other nodes.
    fn exchange_lines(&self, exchange: &Exchange) -> Vec<String> {
        let line = self.exchange(exchange);
        let (Some(packed), Some(casts)) = (&exchange.packed, &self.comm_cast) else {
            return vec![line];
        };
        let symbol = |step: &usize| casts.symbol(&casts.steps[*step]).to_string();
        let launch = |step: &usize| format!("{NODES:<9}{}", symbol(step));
        let (name, bytes) = (packed.comm_dtype, packed.row_bytes);
        let line = format!("{line}; between nodes {name}, {bytes} bytes a row");
        let before = packed.pack.iter().map(launch);
        before.chain([line, launch(&packed.unpack)]).collect()
    }

    fn exchange(&self, exchange: &Exchange) -> String {
        let (tokens, experts, shared) = (PlanPart::Dispatch, PlanPart::Experts, PlanPart::Shared);
        let shadows = PlanPart::Shadows;
        let name = |part: PlanPart, id: TensorId| &*self.part(part)[id].name;
        let row = |part: PlanPart, id| self.row_bytes(part, id);
        let text = match exchange.op {
            CollectiveOp::TokenCounts => "token counts of all ranks: 8 bytes".to_string(),
            CollectiveOp::RowCounts => {
                let experts = self.experts_here().len();
                format!(
                    "row counts to the experts' ranks: {} bytes from each",
                    8 * experts
                )
            }
            CollectiveOp::TokensPerExpert => format!(
                "tokens per expert of all ranks, which choose shadows: {} bytes from each",
                8 * self.tokens.spec.shape.experts
            ),
            CollectiveOp::KeepShadowRows { from, to } => format!(
                "{} that stay to {} of shadows: {} bytes a row",
                name(tokens, from),
                name(shadows, to),
                row(tokens, from)
            ),
            CollectiveOp::ReturnShadowRows { from, to } => format!(
                "{} of shadows to {}: {} bytes a row",
                name(shadows, from),
                name(tokens, to),
                row(shadows, from)
            ),
            CollectiveOp::BroadcastShadowWeight { from, to } => format!(
                "{} of experts with shadows to all: at most {} bytes",
                name(experts, from),
                self.part(shadows)[to].bytes(0)
            ),
            CollectiveOp::ReduceShadowGradient { from, to } => format!(
                "{} of shadows summed to {} of their owners: at most {} bytes",
                name(shadows, from),
                name(experts, to),
                self.part(shadows)[from].bytes(0)
            ),
            CollectiveOp::Dispatch { from, to } => format!(
                "{} to {} of experts: {} bytes a row{}",
                name(tokens, from),
                name(experts, to),
                row(tokens, from),
                to_each(self.by().mesh().expert_tp)
            ),
            CollectiveOp::Combine { from, to } => format!(
                "{} of experts to {}: {} bytes a row",
                name(experts, from),
                name(tokens, to),
                row(experts, from)
            ),
            CollectiveOp::AllReduceTp { tensor } => format!(
                "{} of experts summed over {} shards: {} bytes a row",
                name(experts, tensor),
                self.by().mesh().expert_tp,
                row(experts, tensor)
            ),
            CollectiveOp::TpTokenCounts => "token counts of TP peers: 8 bytes".to_string(),
            CollectiveOp::AllGatherTp { from, to } => format!(
                "{} to {} of shared experts: {} bytes a row{}",
                name(tokens, from),
                name(shared, to),
                row(tokens, from),
                to_each(self.mesh.expert_tp)
            ),
            CollectiveOp::ReduceScatterTp { from, to } => format!(
                "{} summed over {} shards to {}: {} bytes a row",
                name(shared, from),
                self.mesh.expert_tp,
                name(tokens, to),
                row(shared, from)
            ),
            CollectiveOp::BroadcastTp { from, to } => format!(
                "{} of the first shard to {} of all: {} bytes",
                name(shared, from),
                name(tokens, to),
                self.tokens[to].bytes(0)
            ),
            CollectiveOp::AllReduceSum { from, to } => format!(
                "{} of all ranks summed to {}: {} bytes",
                name(tokens, from),
                name(tokens, to),
                self.tokens[from].bytes(0)
            ),
            CollectiveOp::CountLiveTokens { ids, .. } => {
                format!(
                    "tokens of all ranks with an expert, counted in {}: 8 bytes",
                    name(tokens, ids)
                )
            }
            CollectiveOp::GlobalRouting => "routing of all ranks' tokens together".to_string(),
            CollectiveOp::ReduceLossParts { tensor } => format!(
                "{} summed over tiles and ranks: {} bytes",
                name(tokens, tensor),
                self.row_bytes(PlanPart::Dispatch, tensor)
            ),
            CollectiveOp::AllReduceMax { tensor } => {
                format!(
                    "maximum of {} over all ranks: 8 bytes",
                    name(tokens, tensor)
                )
            }
            CollectiveOp::AllGatherWeight { weight, .. } => format!(
                "{} of {} ranks gathered: {} bytes",
                name(experts, weight),
                self.block(),
                self.experts[weight].bytes(0)
            ),
            CollectiveOp::ReduceScatterGradient { gradient, .. } => format!(
                "{} summed over {} ranks to its owners: {} bytes",
                name(experts, gradient),
                self.block(),
                self.experts[gradient].bytes(0)
            ),
            CollectiveOp::AllGatherExperts { from, to } => format!(
                "{} of all experts: {} bytes",
                name(experts, from),
                self.tokens[to].bytes(0)
            ),
        };
        format!("ranks    {text}")
    }

    fn block(&self) -> usize {
        self.by().block(self.mesh.rank(self.place)).len()
    }
}

fn to_each(shards: usize) -> String {
    match shards {
        1 => String::new(),
        shards => format!(", to each of {shards} shards"),
    }
}
