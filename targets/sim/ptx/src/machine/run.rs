//! Runs a warp: groups of threads, divergence, control flow.

use super::ClusterRunner;
use super::warp::{Flow, Group, Wait, Warp};
use crate::code::op::{Guard, NONE, PtxOp};
use crate::finding::{Fault, FindingKind, Step};

/// Backward branches of a group before other threads may go first.
const TURN: u32 = 4096;

/// The end of a group's run.
enum Leave {
    /// The group stands at another instruction: others go first or merge with
    /// it.
    At(u32),
    Wait(u32, Wait),
    /// Every thread of the group ended, or moved into other groups of the warp.
    Gone,
    TurnOver(u32),
}

impl ClusterRunner<'_> {
    /// Runs a warp until no group can go on; returns true if any group ran.
    pub fn run_warp(&mut self, warp: &mut Warp) -> Step<bool> {
        let (mut ran, mut turns) = (false, 0);
        self.early = warp.early;
        loop {
            merge(&mut warp.groups);
            let ready = warp
                .groups
                .iter()
                .enumerate()
                .filter(|(_, group)| group.wait == Wait::No);
            let Some((at, _)) = ready.min_by_key(|(_, group)| group.pc) else {
                // The group that is furthest behind goes first. Reconvergence
                // follows from that alone: code after a join has a higher
                // address than both arms, so the arms meet there. The PTX ISA
                // promises independent progress ("Independent Thread
                // Scheduling", Volta and later) and no order, so any choice is
                // legal.
                return Ok(ran);
            };
            let mut group = warp.groups.swap_remove(at);
            let others = !warp.groups.is_empty();
            match self.run_group(warp, &group, others)? {
                Leave::At(pc) => {
                    group.pc = pc;
                    warp.groups.push(group);
                    ran = true;
                }
                Leave::Wait(pc, wait) => {
                    // Coming to a wait is progress only when others move.
                    ran |= group.pc != pc || matches!(wait, Wait::Barrier { .. });
                    group.pc = pc;
                    group.wait = wait;
                    warp.groups.push(group);
                }
                Leave::Gone => ran = true,
                Leave::TurnOver(pc) => {
                    group.pc = pc;
                    // A spinning group has to let the others run, or a thread
                    // that waits for another lane of its own warp would hang
                    // the simulator. Hardware from sm_70 on makes the same
                    // promise.
                    group.wait = Wait::Politely;
                    warp.groups.push(group);
                    ran = true;
                    turns += 1;
                    if turns > 1 {
                        return Ok(true);
                    }
                }
            }
        }
    }

    /// Runs one group, which is not in the warp's list meanwhile.
    fn run_group(&mut self, warp: &mut Warp, group: &Group, others: bool) -> Step<Leave> {
        let kernel = self.kernel;
        let (mut pc, lanes, mut back) = (group.pc as usize, group.lanes, 0);
        loop {
            let instruction = &kernel.code[pc];
            self.executed[pc] += 1;
            let mask = guarded(warp, instruction.guard, lanes);
            // The registers of a running wgmma are off limits for every
            // instruction, so this check stands before all others; kernels
            // without wgmma skip it.
            if kernel.has_products {
                self.watch(warp, pc, mask)?;
            }
            let next = if (self.execute)(warp, &instruction.op, mask) {
                pc + 1
            } else {
                self.pc = pc as u32;
                match self.step(warp, &instruction.op, pc, lanes, mask)? {
                    Ok(next) => next,
                    Err(leave) => return Ok(leave),
                }
            };
            if next <= pc {
                back += 1;
                if back == TURN {
                    return Ok(Leave::TurnOver(next as u32));
                }
            }
            pc = next;
            if others && should_stop(&warp.groups, pc as u32) {
                return Ok(Leave::At(pc as u32));
            }
        }
    }

    /// Executes everything but arithmetic; returns the next instruction or the
    /// end of the run.
    #[inline(always)]
    fn step(
        &mut self,
        warp: &mut Warp,
        op: &PtxOp,
        pc: usize,
        lanes: u32,
        mask: u32,
    ) -> Step<Result<usize, Leave>> {
        match op {
            PtxOp::Branch { to } => Ok(branch(warp, pc, *to, lanes, mask)),
            // A predicated-off instruction has no effect and must not fault on
            // the addresses in its registers: kernels guard the ends of their
            // tensors so.
            _ if mask == 0 => Ok(Ok(pc + 1)),
            PtxOp::Load(access) => self.load(warp, access, mask).map(|()| Ok(pc + 1)),
            PtxOp::Store(access) => self.store(warp, access, mask).map(|()| Ok(pc + 1)),
            PtxOp::Exit => self.exit(warp, pc, lanes, mask),
            PtxOp::BranchTable { index, to } => Ok(Err(table(warp, pc, *index, to, lanes, mask))),
            _ => {
                let flow = self.act(warp, op, lanes, mask)?;
                Ok(match flow {
                    Flow::Next => Ok(pc + 1),
                    Flow::Again(wait) => {
                        // The instruction runs again after the wait; counting
                        // it twice would make instruction counts depend on the
                        // schedule.
                        self.executed[pc] -= 1;
                        Err(self.pause(warp, pc, pc, lanes, mask, wait))
                    }
                    Flow::After(wait) => Err(self.pause(warp, pc, pc + 1, lanes, mask, wait)),
                })
            }
        }
    }

    /// Makes the lanes of `mask` wait; lanes that the guard excluded go on
    /// alone.
    fn pause(
        &mut self,
        warp: &mut Warp,
        pc: usize,
        resume: usize,
        lanes: u32,
        mask: u32,
        wait: Wait,
    ) -> Leave {
        if lanes == mask {
            return Leave::Wait(resume as u32, wait);
        }
        warp.groups.push(Group {
            pc: resume as u32,
            lanes: mask,
            wait,
        });
        warp.groups.push(Group {
            pc: pc as u32 + 1,
            lanes: lanes & !mask,
            wait: Wait::No,
        });
        Leave::Gone
    }

    #[inline(never)]
    fn act(&mut self, warp: &mut Warp, op: &PtxOp, lanes: u32, mask: u32) -> Step<Flow> {
        match op {
            PtxOp::Atomic(atomic) => self.atomic(warp, atomic, mask).map(|()| Flow::Next),
            PtxOp::Warp(op) => self.collective(warp, op, mask),
            PtxOp::Barrier(barrier) => self.block_barrier(warp, barrier, mask),
            PtxOp::Cluster(barrier) => self.cluster_step(warp, *barrier, mask),
            PtxOp::Mbarrier(op) => self.mbarrier(warp, op, mask),
            PtxOp::Async(op) => self.asynchronous(warp, op, mask),
            PtxOp::Mma(mma) => self.mma(warp, mma, mask),
            PtxOp::Matrix(matrix) => self.matrix(warp, matrix, mask),
            PtxOp::Fence(fence) => {
                self.fence(warp, *fence, mask);
                Ok(Flow::Next)
            }
            PtxOp::AwaitLaunches => {
                warp.early &= !mask;
                self.early = warp.early;
                Ok(Flow::Next)
            }
            PtxOp::SetMaxRegisters { grow, count } => self.set_registers(warp, *grow, *count, mask),
            PtxOp::Clock { d, wide } => {
                // Each read advances the clock, so a loop that waits for time
                // to pass ends, and two reads always differ. Nothing else
                // depends on the step.
                self.clock += 100;
                if *wide {
                    warp.put_double(*d, &[self.clock; 32], mask)
                } else {
                    warp.put(*d, &[self.clock as u32; 32], mask)
                }
                Ok(Flow::Next)
            }
            PtxOp::Trap => Err(Fault::new(
                FindingKind::Trap,
                lanes & mask,
                "the kernel gave up",
            )),
            _ => Ok(Flow::Next),
        }
    }

    fn exit(
        &mut self,
        warp: &mut Warp,
        pc: usize,
        lanes: u32,
        mask: u32,
    ) -> Step<Result<usize, Leave>> {
        self.changes += 1;
        // PTX ISA, "griddepcontrol": a grid completes its dependents when all
        // its blocks exit. A block that ends without waiting may finish before
        // the grid it depends on, and the grid after the next then overtakes
        // both.
        if warp.early & mask != 0 {
            let text = "ends without having waited for the launches before this one, which the \
                        next may then overtake";
            let kind = FindingKind::LaunchOrder;
            return Err(Fault::new(kind, warp.early & mask, text));
        }
        self.end_threads(warp, mask)?;
        warp.ended |= mask;
        let left = lanes & !mask;
        if left != 0 {
            warp.groups.push(Group {
                pc: pc as u32 + 1,
                lanes: left,
                wait: Wait::No,
            });
        }
        Ok(Err(Leave::Gone))
    }

    /// Returns a wait unless every lane of the warp is in `mask`. `.aligned`
    /// instructions need all lanes at once, and lanes that have ended never
    /// come (PTX ISA, "barrier": all threads in the warp must execute the same
    /// instruction).
    pub fn whole_warp(&self, warp: &Warp, mask: u32) -> Option<Flow> {
        let all = warp.lanes;
        (mask != all).then_some(Flow::Again(Wait::Lanes(all)))
    }
}

#[inline(always)]
fn guarded(warp: &Warp, guard: Guard, lanes: u32) -> u32 {
    match guard.row {
        NONE => lanes,
        row => lanes & warp.predicate(row, guard.negate),
    }
}

/// Returns true if a group at `pc` must let others go first, or has met some.
fn should_stop(groups: &[Group], pc: u32) -> bool {
    groups.iter().any(|other| match other.wait {
        Wait::No => other.pc <= pc,
        Wait::Lanes(_) => other.pc == pc,
        _ => false,
    })
}

/// Joins groups at the same instruction. Groups that wait for each other may
/// then go on.
fn merge(groups: &mut Vec<Group>) {
    let meets = |group: &Group| matches!(group.wait, Wait::No | Wait::Lanes(_));
    let mut at = 0;
    while at < groups.len() {
        let mut other = at + 1;
        while other < groups.len() {
            let same = groups[at].pc == groups[other].pc;
            // Joining clears the wait of both: the instruction is executed
            // again and decides with the larger mask whether lanes are still
            // missing.
            if same && meets(&groups[at]) && meets(&groups[other]) {
                groups[at].lanes |= groups[other].lanes;
                groups[at].wait = Wait::No;
                groups.swap_remove(other);
            } else {
                other += 1;
            }
        }
        at += 1;
    }
}

#[inline(always)]
fn branch(warp: &mut Warp, pc: usize, to: u32, lanes: u32, taken: u32) -> Result<usize, Leave> {
    if taken == lanes {
        return Ok(to as usize);
    }
    if taken == 0 {
        return Ok(pc + 1);
    }
    for (pc, lanes) in [(to, taken), (pc as u32 + 1, lanes & !taken)] {
        warp.groups.push(Group {
            pc,
            lanes,
            wait: Wait::No,
        });
    }
    Err(Leave::Gone)
}

fn table(warp: &mut Warp, pc: usize, index: u16, to: &[u32], lanes: u32, mask: u32) -> Leave {
    let index = *warp.word(index);
    let mut push = |pc: u32, lanes: u32| {
        if lanes != 0 {
            warp.groups.push(Group {
                pc,
                lanes,
                wait: Wait::No,
            });
        }
    };
    for (at, target) in to.iter().enumerate() {
        let chosen = (0..32).fold(0, |chosen, lane| {
            chosen | u32::from(index[lane] as usize == at) << lane
        });
        push(*target, chosen & mask);
    }
    push(pc as u32 + 1, lanes & !mask);
    Leave::Gone
}
