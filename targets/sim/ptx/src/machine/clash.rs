//! The messages for two accesses that nothing orders.

use super::ClusterRunner;
use super::shadow::Clash;
use super::state::sync::Component;
use super::warp::Warp;
use crate::finding::{Fault, FindingKind};

impl ClusterRunner<'_> {
    /// Returns the fault of two accesses that nothing orders; the triple holds
    /// the verb, the offset and the number of bytes.
    #[cold]
    pub fn clash(
        &self,
        warp: &Warp,
        lanes: u32,
        (verb, offset, bytes): (&str, usize, usize),
        clash: Clash,
    ) -> Box<Fault> {
        let (kind, other) = match clash {
            Clash::Write { pc, .. } => (FindingKind::SharedRace, Some(pc)),
            Clash::Read { .. } => (FindingKind::SharedRace, None),
            Clash::Copy { pc, .. } | Clash::Bulk { pc } => (FindingKind::CopyInFlight, Some(pc)),
            Clash::EngineReads { .. } => (FindingKind::CopyInFlight, None),
            Clash::NoFence { pc, .. } => (FindingKind::MissingProxyFence, Some(pc)),
            Clash::Unwritten => (FindingKind::UninitialisedShared, None),
        };
        let text = format!(
            "{verb} {bytes} bytes of shared memory at {offset:#x} that {}",
            self.against(warp, clash)
        );
        let mut fault = Fault::new(kind, lanes, text);
        fault.other = other;
        fault
    }

    /// Describes the other access.
    fn against(&self, warp: &Warp, clash: Clash) -> String {
        let name = |thread: u32| self.thread_name(warp, thread);
        match clash {
            Clash::Write { thread, .. } => {
                format!("{} writes, and nothing orders the two", name(thread))
            }
            Clash::Read { thread } => {
                format!("{} reads, and nothing orders the two", name(thread))
            }
            Clash::Copy { thread, .. } => format!(
                "a cp.async of {} writes; it has not been waited for",
                name(thread)
            ),
            Clash::Bulk { .. } => {
                "a bulk copy writes; its mbarrier has not been waited for".to_string()
            }
            Clash::EngineReads { component } => self.engine_name(component),
            Clash::NoFence { thread, .. } => format!(
                "{} wrote by an ordinary instruction; no fence.proxy.async stands between",
                name(thread)
            ),
            Clash::Unwritten => "nothing has written".to_string(),
        }
    }

    /// Returns the name of a thread of the cluster for messages.
    pub fn thread_name(&self, warp: &Warp, thread: u32) -> String {
        let number = (thread / 32) as usize;
        let owner = self
            .blocks
            .iter()
            .position(|block| block.warps.contains(&number));
        let owner = owner.unwrap_or(0);
        let inside = thread - 32 * self.blocks[owner].warps.start as u32;
        if owner == warp.block as usize {
            format!("thread {inside}")
        } else {
            format!("thread {inside} of block {owner} of the cluster")
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
