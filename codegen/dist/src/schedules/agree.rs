//! Plans that compare an operation across ranks while its data take another path, such as NCCL.

use super::{BufferRef, CollectivePlan, ExpectedCount, Message, ScheduleStep, Span};

const NUMBER: usize = 8;

/// Renames the exchanges of a plan for errors.
pub fn agreement(mut plan: CollectivePlan) -> CollectivePlan {
    for step in &mut plan.steps {
        if let ScheduleStep::Exchange { name, .. } = step {
            *name = "agreement";
        }
    }
    plan
}

/// Plans the check of an exchange: every rank sends the size of each message to its receiver,
/// which compares it. Messages are given as peer and bytes.
pub fn sizes(rank: usize, sends: &[(usize, usize)], receives: &[(usize, usize)]) -> CollectivePlan {
    let others = |list: &[(usize, usize)]| -> Vec<(usize, u64)> {
        let others = list.iter().filter(|(peer, _)| *peer != rank);
        others.map(|(peer, bytes)| (*peer, *bytes as u64)).collect()
    };
    let (sends, receives) = (others(sends), others(receives));
    let at = |index: usize| index * NUMBER;
    let message = |(index, peer): (usize, usize)| Message {
        peer,
        span: Span::new(BufferRef::Scratch, at(index)..at(index + 1)),
    };
    let peers = |list: &[(usize, u64)], from: usize| -> Vec<Message> {
        let numbered = list.iter().enumerate();
        numbered
            .map(|(i, (peer, _))| message((from + i, *peer)))
            .collect()
    };
    let expected = receives.iter().enumerate();
    CollectivePlan {
        scratch: at(sends.len() + receives.len()),
        steps: vec![
            ScheduleStep::Write(0, sends.iter().map(|(_, bytes)| *bytes).collect()),
            ScheduleStep::Exchange {
                phase: 0,
                name: "agreement",
                sends: peers(&sends, 0),
                receives: peers(&receives, sends.len()),
                copies: Vec::new(),
            },
            ScheduleStep::Check {
                what: "the number of bytes from there to here",
                numbers: expected
                    .map(|(i, (peer, bytes))| ExpectedCount {
                        offset: at(sends.len() + i),
                        value: *bytes,
                        peer: *peer,
                    })
                    .collect(),
            },
        ],
    }
}
