//! The scheduler: the order in which warps run, and the report of a deadlock.

use super::ClusterRunner;
use super::warp::{Group, Wait, Warp};
use crate::finding::{Fault, FaultPlace, FindingKind, Step, threads};

/// Passes over all warps without any event that others could wait for, after
/// which spinning threads count as a deadlock.
const PATIENCE: u32 = 300;

impl ClusterRunner<'_> {
    /// Runs all warps of the cluster to their end. An error comes with the
    /// number of its warp.
    pub fn schedule(&mut self) -> Result<(), (usize, Box<Fault>)> {
        let count = self.warps.len();
        let (mut idle, mut seen) = (0, self.changes);
        loop {
            // A random first warp varies the order in which warps reach
            // barriers and copies finish; seed 0 keeps one order for those who
            // debug.
            let first = match self.launch.seed {
                0 => 0,
                _ => self.random.below(count as u64) as usize,
            };
            let (mut ran, mut alive) = (false, false);
            for at in 0..count {
                let number = (first + at) % count;
                if self.warps[number].is_done() {
                    continue;
                }
                alive = true;
                ran |= self.turn(number).map_err(|fault| (number, fault))?;
                self.engines(false).map_err(|fault| (number, fault))?;
            }
            if !alive {
                return self.finish();
            }
            // A copy or product may have finished for which warps earlier in
            // this pass wait.
            let still = self.changes == seen;
            idle = if still { idle + 1 } else { 0 };
            seen = self.changes;
            // Nobody ran and nothing changed, or threads have spun for long:
            // finish all copies and products at once. If that changes nothing
            // either, only a thread could end the wait, and none will.
            let stuck = (!ran && still) || idle > PATIENCE;
            if stuck && !self.engines(true).map_err(|fault| (first, fault))? {
                return Err(self.deadlock());
            }
        }
    }

    /// Runs one warp until it has to wait or its turn is over.
    fn turn(&mut self, number: usize) -> Step<bool> {
        let mut warp = std::mem::take(&mut self.warps[number]);
        for group in &mut warp.groups {
            if group.wait != Wait::No && self.may_go_on(number, group) {
                group.wait = Wait::No;
            }
        }
        let result = self.run_warp(&mut warp);
        self.warps[number] = warp;
        result
    }

    /// Returns true if the event that a group waits for has happened.
    fn may_go_on(&self, number: usize, group: &Group) -> bool {
        match group.wait {
            Wait::No | Wait::Politely => true,
            Wait::Lanes(_) => false,
            _ => self.has_come(number, group),
        }
    }

    /// Returns the deadlock: every waiting thread and the event it waits for.
    fn deadlock(&self) -> (usize, Box<Fault>) {
        if let Some(found) = self.lonely_lanes() {
            return found;
        }
        let mut lines: Vec<String> = Vec::new();
        let mut first: Option<(usize, FaultPlace)> = None;
        for (number, warp) in self.warps.iter().enumerate() {
            for group in &warp.groups {
                let place = FaultPlace {
                    pc: group.pc,
                    block: warp.block,
                    threads: warp.threads(group.lanes),
                };
                lines.push(self.waiting(warp, group));
                first.get_or_insert((number, place));
            }
        }
        let more = lines.len().saturating_sub(12);
        lines.truncate(12);
        if more > 0 {
            lines.push(format!("and {more} more"));
        }
        let (number, place) = first.unwrap_or((
            0,
            FaultPlace {
                pc: 0,
                block: 0,
                threads: Vec::new(),
            },
        ));
        let mut fault = Fault::new(
            FindingKind::Deadlock,
            0,
            format!("no thread can go on\n    {}", lines.join("\n    ")),
        );
        fault.at = Some(place);
        (number, fault)
    }

    /// Finds lanes that wait for others of their warp which wait elsewhere.
    fn lonely_lanes(&self) -> Option<(usize, Box<Fault>)> {
        self.warps.iter().enumerate().find_map(|(number, warp)| {
            let group = warp
                .groups
                .iter()
                .find(|group| matches!(group.wait, Wait::Lanes(_)))?;
            Some((number, self.partial(warp, group)))
        })
    }

    /// Returns the fault of lanes whose companions never came.
    pub fn partial(&self, warp: &Warp, group: &Group) -> Box<Fault> {
        let Wait::Lanes(mask) = group.wait else {
            return Fault::new(FindingKind::Deadlock, 0, "no thread can go on");
        };
        let missing = mask & warp.lanes & !group.lanes;
        let ended = missing & warp.ended;
        let mut text = format!(
            "{} came to an instruction for {}",
            threads(&warp.threads(group.lanes)),
            threads(&warp.threads(mask & warp.lanes)),
        );
        if ended != 0 {
            text += &format!("; {} ended", threads(&warp.threads(ended)));
        }
        for other in warp
            .groups
            .iter()
            .filter(|other| other.lanes & missing != 0)
        {
            text += &format!("; {}", self.waiting(warp, other));
        }
        let mut fault = Fault::new(FindingKind::PartialWarp, group.lanes, text);
        fault.at = Some(FaultPlace {
            pc: group.pc,
            block: warp.block,
            threads: warp.threads(group.lanes),
        });
        fault
    }

    /// Describes a group that does not go on, in one line.
    fn waiting(&self, warp: &Warp, group: &Group) -> String {
        let line = self.kernel.code[group.pc as usize].line;
        let who = threads(&warp.threads(group.lanes));
        let block = match self.blocks.len() {
            1 => String::new(),
            _ => format!(" of block {} of the cluster", warp.block),
        };
        format!(
            "{who}{block}: {} (PTX line {line})",
            self.reason(warp, group)
        )
    }

    fn reason(&self, warp: &Warp, group: &Group) -> String {
        match &group.wait {
            Wait::No | Wait::Politely => "spin".to_string(),
            Wait::Lanes(mask) => {
                let missing = mask & !group.lanes & warp.lanes;
                format!("wait for {} of the warp", threads(&warp.threads(missing)))
            }
            Wait::Barrier { id, .. } => self.barrier_state(warp.block, *id),
            Wait::Mbarrier { address, parity } => {
                self.mbarrier_state(warp.block, *address, *parity)
            }
            Wait::Products(left) => format!("wait for wgmma groups, all but {left}"),
            Wait::Bulk { left, .. } => format!("wait for bulk copies, all but {left}"),
            Wait::Registers(count) => format!("wait for {count} more registers of each thread"),
            Wait::Cluster => "wait for the other blocks of the cluster".to_string(),
        }
    }
}
