//! What a rank does, in lines for people.

use super::data::NODES;
use super::{Exchange, RankPlan, RankStep, Side, Way};
use crate::{LayerPlan, Step, TensorId};
use std::fmt::Write;

impl RankPlan {
    /// The steps of every pass, a line each: whose kernel is launched, or what goes where.
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
                let (lines, piece) = match step {
                    RankStep::Launch { side, step, piece } => {
                        let launched = &launched(self.side(*side))[*step];
                        (vec![self.launch(*side, launched)], piece)
                    }
                    RankStep::Exchange(exchange) => (self.around(exchange), &exchange.piece),
                };
                let piece = piece.map_or(String::new(), |piece| format!(", piece {piece}"));
                for line in lines {
                    let _ = writeln!(text, "  {line}{piece}");
                }
            }
        }
        text
    }

    fn launch(&self, side: Side, step: &Step) -> String {
        let whose = side.name();
        format!("{whose:<9}{}", self.side(side).symbol(step))
    }

    /// An exchange, between the launches for the rows of it that go to other nodes.
    fn around(&self, exchange: &Exchange) -> Vec<String> {
        let line = self.exchange(exchange);
        let (Some(packed), Some(wire)) = (&exchange.packed, &self.wire) else {
            return vec![line];
        };
        let symbol = |step: &usize| wire.symbol(&wire.steps[*step]).to_string();
        let launch = |step: &usize| format!("{NODES:<9}{}", symbol(step));
        let (name, bytes) = (packed.wire, packed.row_bytes);
        let line = format!("{line}; between nodes {name}, {bytes} bytes a row");
        let before = packed.pack.iter().map(launch);
        before.chain([line, launch(&packed.unpack)]).collect()
    }

    fn exchange(&self, exchange: &Exchange) -> String {
        let (tokens, experts, shared) = (Side::Tokens, Side::Experts, Side::Shared);
        let shadows = Side::Shadows;
        let name = |side: Side, id: TensorId| &*self.side(side)[id].name;
        let row = |side: Side, id| self.row_bytes(side, id);
        let what = match exchange.way {
            Way::Tokens => "every rank's number of tokens to all: 8 bytes".to_string(),
            Way::Counts => {
                let experts = self.experts_here().len();
                format!(
                    "rows for each expert to its ranks: {} bytes from each",
                    8 * experts
                )
            }
            Way::Loads => format!(
                "rows of all for every expert, and which have shadows: {} bytes from each",
                8 * self.tokens.spec.shape.experts
            ),
            Way::ToShadows { from, to } => format!(
                "{} that stay to {} of shadows: {} bytes a row",
                name(tokens, from),
                name(shadows, to),
                row(tokens, from)
            ),
            Way::FromShadows { from, to } => format!(
                "{} of shadows to {}: {} bytes a row",
                name(shadows, from),
                name(tokens, to),
                row(shadows, from)
            ),
            Way::ShadowWeight { from, to } => format!(
                "{} of experts with shadows to all: at most {} bytes",
                name(experts, from),
                self.side(shadows)[to].bytes(0)
            ),
            Way::ShadowGradient { from, to } => format!(
                "{} of shadows summed to {} of their owners: at most {} bytes",
                name(shadows, from),
                name(experts, to),
                self.side(shadows)[from].bytes(0)
            ),
            Way::ToExperts { from, to } => format!(
                "{} to {} of experts: {} bytes a row{}",
                name(tokens, from),
                name(experts, to),
                row(tokens, from),
                to_each(self.by().mesh().shards)
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
                self.by().mesh().shards,
                row(experts, tensor)
            ),
            Way::Neighbours => "each slice's number of tokens to the others: 8 bytes".to_string(),
            Way::ToSlices { from, to } => format!(
                "{} to {} of shared experts: {} bytes a row{}",
                name(tokens, from),
                name(shared, to),
                row(tokens, from),
                to_each(self.mesh.shards)
            ),
            Way::FromSlices { from, to } => format!(
                "{} summed over {} slices to {}: {} bytes a row",
                name(shared, from),
                self.mesh.shards,
                name(tokens, to),
                row(shared, from)
            ),
            Way::OfFirst { from, to } => format!(
                "{} of the first slice to {} of all: {} bytes",
                name(shared, from),
                name(tokens, to),
                self.tokens[to].bytes(0)
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
            Way::Placed => "where tokens go, as routing those of all ranks says".to_string(),
            Way::LossParts { tensor } => format!(
                "{} summed over tiles and ranks: {} bytes",
                name(tokens, tensor),
                self.row_bytes(Side::Tokens, tensor)
            ),
            Way::Most { tensor } => {
                format!(
                    "{} is the largest of all ranks: 8 bytes",
                    name(tokens, tensor)
                )
            }
            Way::GatherWeight { weight, .. } => format!(
                "{} of {} ranks gathered: {} bytes",
                name(experts, weight),
                self.block(),
                self.experts[weight].bytes(0)
            ),
            Way::ScatterGradient { gradient, .. } => format!(
                "{} summed over {} ranks to its owners: {} bytes",
                name(experts, gradient),
                self.block(),
                self.experts[gradient].bytes(0)
            ),
            Way::Gather { from, to } => format!(
                "{} of all experts: {} bytes",
                name(experts, from),
                self.tokens[to].bytes(0)
            ),
        };
        format!("ranks    {what}")
    }

    fn block(&self) -> usize {
        self.by().block(self.mesh.rank(self.place)).len()
    }
}

fn to_each(slices: usize) -> String {
    match slices {
        1 => String::new(),
        slices => format!(", to each of {slices} slices"),
    }
}
