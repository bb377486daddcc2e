//! Exchanges over other ranks.

use super::group::{BegunHandle, Nccl};
use crate::api::{Algorithm, Call, Collectives, Transfer};
use crate::eager::Kind;
use crate::plan::{self, HopCounts, Schedule};
use crate::{CollectiveError, Slice, checks, hierarchical};

impl Nccl {
    /// [`Collectives::exchange_counts`].
    /// By eager messages where something carries them, else on the stream, for which this waits.
    pub(super) fn tell_ranks(
        &mut self,
        algorithm: Algorithm,
        pieces: usize,
        units: &[u64],
        call: &Call,
    ) -> Result<HopCounts, CollectiveError> {
        let kind = Kind::Agree;
        if let Some(told) = self.by_control(1, |control| {
            control.exchange_counts(algorithm, pieces, units, call)
        }) {
            return told;
        }
        checks::units(kind, pieces, units.len(), self.size())?;
        let exchange = hierarchical::CountExchange::new(algorithm, self.size(), kind)?;
        let (plan, next) = exchange.plan(self.rank(), pieces, units);
        let mut task = self.task(kind, call);
        task.waits = Some("the host has to know what it brings");
        self.start_plans(task, &[], &[], plan.packed(), Some(next))?
            .wait()?;
        exchange.result(kind)
    }

    /// [`Collectives::exchange_with`].
    pub(super) fn exchange_over_ranks(
        &mut self,
        sends: &[Transfer],
        receives: &[Transfer],
        schedule: &dyn Schedule,
        call: &Call,
    ) -> BegunHandle {
        let kind = Kind::Exchange;
        let own = (self.rank(), self.size());
        checks::transfers(kind, own.0, own.1, sends, receives)?;
        let (to, from) = (hierarchical::sizes(sends), hierarchical::sizes(receives));
        let plan = schedule.plan(own, &to, &from);
        let plan = plan
            .map_err(|reason| checks::invalid(kind, reason))?
            .packed();
        let slices = |list| -> Vec<&Slice> { <[Transfer]>::iter(list).map(|t| &t.slice).collect() };
        let mut task = self.task(kind, call);
        task.signature.ways = schedule.code();
        // What is sent on the way, too: some of what comes may be made of it there.
        let [to, from] = plan.traffic();
        task.agreement = Some(plan::sizes(own.0, &to, &from));
        self.start_plan(task, &slices(sends), &slices(receives), plan)
    }
}
