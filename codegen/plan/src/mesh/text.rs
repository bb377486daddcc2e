//! The steps of a rank as text.

use super::data::NODES;
use super::{Exchange, PartTensor, RankPlan, RankStep};
use crate::{LayerPlan, Step};
use moesaic_dist::{Amount, NUMBER_BYTES, OpGroup, OpText, PlanPart};
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
        let row = exchange.op.row();
        let name = |tensor: Option<PartTensor>| {
            tensor.map_or("", |PartTensor { part, tensor }| {
                &*self.part(part)[tensor].name
            })
        };
        let text = row.text(&OpText {
            from: name(exchange.reads()),
            to: name(exchange.writes()),
            bytes: self.unit_bytes(exchange),
            ranks: self.ranks_of(row.group),
            shards: match row.group {
                OpGroup::SharedTp => self.mesh.expert_tp,
                _ => self.by().mesh().expert_tp,
            },
        });
        format!("ranks    {text}")
    }

    /// Returns the bytes of one unit of an exchange: a row, the numbers of one rank, a tensor.
    fn unit_bytes(&self, exchange: &Exchange) -> u64 {
        let tensor = |of: PartTensor| self.part(of.part)[of.tensor].bytes(0);
        let row = |of: PartTensor| self.row_bytes(of.part, of.tensor) as u64;
        let bytes_of =
            |of: Option<PartTensor>, bytes: &dyn Fn(PartTensor) -> u64| of.map_or(0, bytes);
        let (reads, writes) = (exchange.reads(), exchange.writes());
        match exchange.op.row().amount {
            Amount::Nothing => 0,
            Amount::Number => NUMBER_BYTES,
            Amount::NumberPerExpert => NUMBER_BYTES * self.tokens.spec.shape.experts as u64,
            Amount::NumberPerOwnExpert => NUMBER_BYTES * self.experts_here().len() as u64,
            Amount::ExpertRows | Amount::ShadowRows | Amount::TokenRows | Amount::OneRow => {
                bytes_of(reads, &row)
            }
            // The expert part's tensor has all experts of a rank, the shadow part's those alone
            // that may have shadows.
            Amount::ShadowTensor => {
                let ends = [reads, writes].into_iter().flatten();
                let mut shadows = ends.filter(|end| end.part == PlanPart::Shadows);
                bytes_of(shadows.next(), &tensor)
            }
            Amount::Tensor | Amount::Region => bytes_of(writes, &tensor),
        }
    }

    /// Returns the number of ranks of a process group.
    fn ranks_of(&self, group: OpGroup) -> usize {
        self.members(group).len()
    }
}
