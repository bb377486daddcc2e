//! What a rank does, in lines for people.

use super::{Exchange, RankPlan, RankStep, Side, Way};
use crate::{Step, TensorId};
use std::fmt::Write;

impl RankPlan {
    /// The steps of every pass, a line each: whose kernel is launched, or what goes where.
    pub fn text(&self) -> String {
        let mut text = String::new();
        let passes = [
            (
                "forward",
                &self.steps,
                [&self.tokens.steps, &self.experts.steps],
            ),
            (
                "evaluation",
                &self.evaluation,
                [&self.tokens.evaluation, &self.experts.evaluation],
            ),
            (
                "backward",
                &self.backward,
                [&self.tokens.backward, &self.experts.backward],
            ),
        ];
        for (name, steps, [tokens, experts]) in passes {
            if steps.is_empty() {
                continue;
            }
            let _ = writeln!(text, "{name}");
            for step in steps {
                let line = match step {
                    RankStep::Launch { side, step } => match side {
                        Side::Tokens => self.launch(*side, &tokens[*step]),
                        Side::Experts => self.launch(*side, &experts[*step]),
                    },
                    RankStep::Exchange(exchange) => self.exchange(exchange),
                };
                let _ = writeln!(text, "  {line}");
            }
        }
        text
    }

    fn launch(&self, side: Side, step: &Step) -> String {
        let whose = match side {
            Side::Tokens => "tokens",
            Side::Experts => "experts",
        };
        format!("{whose:<9}{}", self.side(side).symbol(step))
    }

    fn exchange(&self, exchange: &Exchange) -> String {
        let (tokens, experts) = (Side::Tokens, Side::Experts);
        let name = |side: Side, id: TensorId| &*self.side(side)[id].name;
        let row = |side: Side, id| self.row_bytes(side, id);
        let what = match exchange.way {
            Way::Tokens => "every rank's number of tokens to all: 8 bytes".to_string(),
            Way::Counts => {
                let experts = self.own_experts().len();
                format!(
                    "rows for each expert to its ranks: {} bytes from each",
                    8 * experts
                )
            }
            Way::ToExperts { from, to } => format!(
                "{} to {} of experts: {} bytes a row{}",
                name(tokens, from),
                name(experts, to),
                row(tokens, from),
                self.slices()
            ),
            Way::ToTokens { from, to } => format!(
                "{} of experts to {}: {} bytes a row",
                name(experts, from),
                name(tokens, to),
                row(experts, from)
            ),
            Way::OverShards { tensor } => format!(
                "{} of experts summed over {} slices: {} bytes a row",
                name(experts, tensor),
                self.mesh.shards,
                row(experts, tensor)
            ),
            Way::Sum { from, to } => format!(
                "{} of all ranks summed to {}: {} bytes",
                name(tokens, from),
                name(tokens, to),
                self.tokens[from].bytes(0)
            ),
            Way::Live { ids, .. } => {
                format!(
                    "tokens of all ranks with an expert, by {}: 8 bytes",
                    name(tokens, ids)
                )
            }
            Way::Most { tensor } => {
                format!(
                    "{} is the largest of all ranks: 8 bytes",
                    name(tokens, tensor)
                )
            }
            Way::Gather { from, to } => format!(
                "{} of all experts: {} bytes",
                name(experts, from),
                self.tokens[to].bytes(0)
            ),
        };
        format!("ranks    {what}")
    }

    fn slices(&self) -> String {
        match self.mesh.shards {
            1 => String::new(),
            shards => format!(", to each of {shards} slices"),
        }
    }
}
