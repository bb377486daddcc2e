//! What is said of two accesses that nothing orders.

use super::Machine;
use super::clocks::Component;
use super::shadow::Clash;
use super::warp::Warp;
use crate::finding::{Fault, FindingKind};

impl Machine<'_> {
    /// The fault of two accesses that nothing orders.
    #[cold]
    #[expect(clippy::too_many_arguments, reason = "one access, spelled out")]
    pub fn clash(
        &self,
        warp: &Warp,
        lanes: u32,
        verb: &str,
        block: usize,
        offset: usize,
        bytes: usize,
        clash: Clash,
    ) -> Box<Fault> {
        let what = format!("{verb} {bytes} bytes of shared memory at {offset:#x}");
        let name = |thread: u32| self.thread_name(warp, thread);
        let (kind, text, other) = match clash {
            Clash::Write { thread, pc } => (
                FindingKind::SharedRace,
                format!(
                    "{what} that {} writes, and nothing orders the two",
                    name(thread)
                ),
                Some(pc),
            ),
            Clash::Read { thread } => (
                FindingKind::SharedRace,
                format!(
                    "{what} that {} reads, and nothing orders the two",
                    name(thread)
                ),
                None,
            ),
            Clash::Copy { thread, pc } => (
                FindingKind::CopyInFlight,
                format!(
                    "{what} that a cp.async of {} writes; it has not been waited for",
                    name(thread)
                ),
                Some(pc),
            ),
            Clash::Bulk { pc } => (
                FindingKind::CopyInFlight,
                format!("{what} that a bulk copy writes; its mbarrier has not been waited for"),
                Some(pc),
            ),
            Clash::EngineReads { component } => (
                FindingKind::CopyInFlight,
                format!("{what} that {}", self.engine_name(component)),
                None,
            ),
            Clash::NoFence { thread, pc } => (
                FindingKind::MissingProxyFence,
                format!(
                    "{what} that {} wrote by an ordinary instruction; \
                     no fence.proxy.async stands between",
                    name(thread)
                ),
                Some(pc),
            ),
            Clash::Unwritten => (
                FindingKind::UninitialisedShared,
                format!("{what} that nothing has written"),
                None,
            ),
        };
        let _ = block;
        let mut fault = Fault::new(kind, lanes, text);
        fault.other = other;
        fault
    }

    /// A thread of the cluster as people call it.
    pub fn thread_name(&self, warp: &Warp, thread: u32) -> String {
        let number = (thread / 32) as usize;
        let owner = self
            .blocks
            .iter()
            .position(|block| block.warps.contains(&number));
        let owner = owner.unwrap_or(0);
        let inside = thread - 32 * self.blocks[owner].warps.start as u32;
        match owner == warp.block as usize {
            true => format!("thread {inside}"),
            false => format!("thread {inside} of block {owner} of the cluster"),
        }
    }

    fn engine_name(&self, component: u32) -> String {
        match self.sync.components.get(component as usize) {
            Some(Component::Products { .. }) => {
                "a wgmma may still read; its group has not been waited for".to_string()
            }
            Some(Component::Bulk { thread }) => format!(
                "a bulk store of thread {} may still read; \
                 its group has not been waited for",
                thread % self.launch.threads.next_multiple_of(32)
            ),
            _ => "an engine may still read".to_string(),
        }
    }
}
