//! Exchanges over intermediate ranks.

use super::group::{BegunHandle, Nccl};
use crate::api::{Call, Collectives, Transfer};
use crate::eager::OpKind;
use crate::schedules::Algorithm;
use crate::schedules::{self, HopCounts, Schedule};
use crate::{CollectiveError, Slice, checks, hierarchical};

impl Nccl {
    /// Implements [`Collectives::exchange_counts`]: over eager messages where a transport carries
    /// them, else on the stream, for which the host waits.
    pub(super) fn count_exchange(
        &mut self,
        algorithm: Algorithm,
        blocks_per_peer: usize,
        units: &[u64],
        call: &Call,
    ) -> Result<HopCounts, CollectiveError> {
        let kind = OpKind::Agree;
        if let Some(counts) = self.by_control(1, |control| {
            control.exchange_counts(algorithm, blocks_per_peer, units, call)
        }) {
            return counts;
        }
        checks::units(kind, blocks_per_peer, units.len(), self.size())?;
        let exchange = hierarchical::CountExchange::new(algorithm, self.size(), kind)?;
        let (plan, next) = exchange.plan(self.rank(), blocks_per_peer, units);
        let mut task = self.task(kind, call);
        task.waits = Some("the host has to know what it brings");
        self.start_plans(task, &[], &[], plan.packed(), Some(next))?
            .wait()?;
        exchange.result(kind)
    }

    /// Implements [`Collectives::exchange_with`].
    pub(super) fn exchange_over_ranks(
        &mut self,
        sends: &[Transfer],
        receives: &[Transfer],
        schedule: &dyn Schedule,
        call: &Call,
    ) -> BegunHandle {
        let kind = OpKind::Exchange;
        let own = self.own_rank();
        checks::transfers(kind, own, sends, receives)?;
        let (to, from) = (hierarchical::sizes(sends), hierarchical::sizes(receives));
        let plan = schedule.plan(own, &to, &from);
        let plan = plan.map_err(|error| checks::invalid(kind, error))?.packed();
        let slices = |list| -> Vec<&Slice> { <[Transfer]>::iter(list).map(|t| &t.slice).collect() };
        let mut task = self.task(kind, call);
        task.signature.hop_code = schedule.code();
        // Compare every message of the plan, not only the caller's: a rank in between may compute
        // what it sends from what it received, as a deduplicated combine does.
        let [to, from] = plan.traffic();
        task.agreement = Some(schedules::sizes(own.rank, &to, &from));
        self.start_plan(task, &slices(sends), &slices(receives), plan)
    }
}
