//! An interpreter that executes the plans of all ranks in memory: no transport, no device.
#![allow(dead_code)]

use moesaic_collectives::schedules::{
    BufferRef, CollectivePlan, Copy, Message, ScheduleStep, Span,
};
use std::collections::{HashMap, VecDeque};

/// A rank's memory.
#[derive(Clone, Default)]
pub struct Memory {
    pub inputs: Vec<Vec<u8>>,
    pub outputs: Vec<Vec<u8>>,
    pub scratch: Vec<u8>,
}

impl Memory {
    /// Returns memory with one input and one output.
    pub fn new(input: Vec<u8>, output: Vec<u8>) -> Memory {
        Memory {
            inputs: vec![input],
            outputs: vec![output],
            scratch: Vec::new(),
        }
    }

    fn of(&mut self, place: BufferRef) -> &mut Vec<u8> {
        match place {
            BufferRef::Input(index) => &mut self.inputs[index],
            BufferRef::Output(index) => &mut self.outputs[index],
            BufferRef::Scratch => &mut self.scratch,
        }
    }

    fn read(&mut self, span: &Span) -> Vec<u8> {
        self.of(span.buffer)[span.offset..span.offset + span.bytes].to_vec()
    }

    fn write(&mut self, place: BufferRef, offset: usize, bytes: &[u8]) {
        self.of(place)[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    fn copy(&mut self, copies: &[Copy]) {
        for copy in copies {
            let bytes = self.read(&copy.from);
            self.write(copy.to, copy.offset, &bytes);
        }
    }
}

pub type Mail = HashMap<(u32, usize, usize), VecDeque<Vec<u8>>>;

/// Executes all plans; the ranks take turns, each going as far as it can.
pub fn replay(plans: &[CollectivePlan], memories: &mut [Memory]) {
    let mut mail = Mail::new();
    let mut at = vec![(0, false); plans.len()];
    for (memory, plan) in memories.iter_mut().zip(plans) {
        memory.scratch = vec![0xEE; plan.scratch];
    }
    while at
        .iter()
        .zip(plans)
        .any(|((step, _), plan)| *step < plan.steps.len())
    {
        let before = at.clone();
        for (rank, plan) in plans.iter().enumerate() {
            while let Some(step) = plan.steps.get(at[rank].0) {
                if !advance(rank, step, &mut at[rank].1, &mut memories[rank], &mut mail) {
                    break;
                }
                at[rank] = (at[rank].0 + 1, false);
            }
        }
        assert_ne!(before, at, "the plans wait for each other");
    }
    assert!(
        mail.values().all(VecDeque::is_empty),
        "a message was not received"
    );
}

/// The messages that a rank sends and receives: peer and bytes.
pub type Ends = [Vec<(usize, Vec<u8>)>; 2];

type Sizes<'a> = &'a [(usize, usize)];

fn sizes(list: &[(usize, Vec<u8>)]) -> Vec<(usize, usize)> {
    list.iter()
        .map(|(peer, data)| (*peer, data.len()))
        .collect()
}

/// Executes the plans that ranks make from the sizes of their messages. It checks that inputs
/// stay unchanged, and returns each rank's received messages together with the plans.
pub fn carry(
    ends: &[Ends],
    plan: &dyn Fn(usize, Sizes<'_>, Sizes<'_>) -> CollectivePlan,
) -> (Vec<CollectivePlan>, Vec<Vec<Vec<u8>>>) {
    let planned = |(rank, [sends, gets]): (usize, &Ends)| plan(rank, &sizes(sends), &sizes(gets));
    let plans: Vec<CollectivePlan> = ends.iter().enumerate().map(planned).collect();
    let memory = |[sends, gets]: &Ends| Memory {
        inputs: sends.iter().map(|(_, data)| data.clone()).collect(),
        outputs: gets
            .iter()
            .map(|(_, data)| vec![0xDD; data.len()])
            .collect(),
        scratch: Vec::new(),
    };
    let mut memories: Vec<Memory> = ends.iter().map(memory).collect();
    replay(&plans, &mut memories);
    for (memory, [sends, _]) in memories.iter().zip(ends) {
        let sent = sends.iter().map(|(_, data)| data);
        assert!(memory.inputs.iter().eq(sent), "the input was written");
    }
    (plans, memories.into_iter().map(|m| m.outputs).collect())
}

/// Returns whether every rank has received what it expects.
pub fn delivered(ends: &[Ends], found: &[Vec<Vec<u8>>]) -> bool {
    let same = |([_, gets], found): (&Ends, &Vec<Vec<u8>>)| {
        let expected = gets.iter().map(|(_, data)| data);
        expected.eq(found)
    };
    ends.len() == found.len() && ends.iter().zip(found).all(same)
}

/// Executes a step as far as possible; returns whether it is complete.
pub fn advance(
    rank: usize,
    step: &ScheduleStep,
    sent: &mut bool,
    memory: &mut Memory,
    mail: &mut Mail,
) -> bool {
    match step {
        ScheduleStep::Exchange {
            phase,
            sends,
            receives,
            copies,
            ..
        } => {
            if !std::mem::replace(sent, true) {
                memory.copy(copies);
                for Message { peer, span } in sends {
                    let bytes = memory.read(span);
                    mail.entry((*phase, rank, *peer))
                        .or_default()
                        .push_back(bytes);
                }
            }
            let there = |m: &Message| {
                mail.get(&(*phase, m.peer, rank)).map_or(0, VecDeque::len)
                    >= receives.iter().filter(|other| other.peer == m.peer).count()
            };
            if !receives.iter().all(there) {
                return false;
            }
            for Message { peer, span } in receives {
                let queue = mail.get_mut(&(*phase, *peer, rank)).unwrap();
                let bytes = queue.pop_front().unwrap();
                assert_eq!(bytes.len(), span.bytes, "from {peer} to {rank}");
                memory.write(span.buffer, span.offset, &bytes);
            }
        }
        ScheduleStep::Repack(copies) => memory.copy(copies),
        ScheduleStep::Write(offset, numbers) => {
            let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
            memory.write(BufferRef::Scratch, *offset, &bytes);
        }
        ScheduleStep::Reduce {
            rows,
            row_bytes,
            to,
            offset,
            ..
        } => {
            // Only sums of bytes are reduced here.
            let rows = &memory.scratch[rows.clone()];
            let sum = |i: usize| {
                rows.iter()
                    .skip(i)
                    .step_by(*row_bytes)
                    .fold(0u8, |a, b| a.wrapping_add(*b))
            };
            let sums: Vec<u8> = (0..*row_bytes).map(sum).collect();
            memory.write(*to, *offset, &sums);
        }
        ScheduleStep::Check { numbers, .. } => {
            for number in numbers {
                let at = number.offset;
                let bytes = memory.scratch[at..at + 8].try_into().unwrap();
                assert_eq!(
                    u64::from_le_bytes(bytes),
                    number.value,
                    "from {}",
                    number.peer
                );
            }
        }
    }
    true
}
