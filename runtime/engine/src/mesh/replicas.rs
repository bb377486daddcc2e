//! Replicas of experts: groups sum their gradients, and the owner's values go to all of them.

use super::process_group::ProcessGroup;
use super::ranks::Ranks;
use crate::error::EngineError;
use moesaic_kernel::DType;
use moesaic_plan::{Parallel, Placement};
use moesaic_target::{Buffer, Device};
use moesaic_tensor::{Tensor, write_f32s};

/// The values of a rank's experts by slot, in one tensor or several.
pub(super) trait Slots {
    /// Reads all values of an expert.
    fn read(&self, slot: usize) -> Result<Vec<u8>, EngineError>;
    /// Replaces the values of an expert by as many bytes.
    fn write(&mut self, slot: usize, bytes: &[u8]) -> Result<(), EngineError>;
    /// Returns the number of bytes and the dtype of each part of an expert's values.
    fn parts(&self) -> Vec<ExpertPart>;
}

/// Values in host memory.
struct Host<'a, 't> {
    parts: &'a mut [&'t mut [u8]],
    experts: usize,
}

impl Slots for Host<'_, '_> {
    fn read(&self, slot: usize) -> Result<Vec<u8>, EngineError> {
        let rows = self.parts.iter().map(|part| {
            let row = part.len() / self.experts;
            &part[slot * row..(slot + 1) * row]
        });
        Ok(rows.collect::<Vec<_>>().concat())
    }

    fn write(&mut self, slot: usize, mut bytes: &[u8]) -> Result<(), EngineError> {
        for part in self.parts.iter_mut() {
            let row = part.len() / self.experts;
            let (own, rest) = bytes.split_at(row);
            part[slot * row..(slot + 1) * row].copy_from_slice(own);
            bytes = rest;
        }
        Ok(())
    }

    // Values in host memory are summed as f32.
    fn parts(&self) -> Vec<ExpertPart> {
        let parts = self.parts.iter();
        let part = |part: &&mut [u8]| ExpertPart {
            bytes: part.len() / self.experts,
            dtype: DType::F32,
        };
        parts.map(part).collect()
    }
}

/// Values of each expert in a buffer.
pub(super) struct SlotPart<'a> {
    pub buffer: &'a Buffer,
    /// The bytes of one expert.
    pub row: usize,
    pub dtype: DType,
}

/// Values on a device.
pub(super) struct OnDevice<'a> {
    pub device: &'a dyn Device,
    pub parts: Vec<SlotPart<'a>>,
}

impl Slots for OnDevice<'_> {
    fn read(&self, slot: usize) -> Result<Vec<u8>, EngineError> {
        let mut all = Vec::new();
        for SlotPart { buffer, row, .. } in &self.parts {
            let first = all.len();
            all.resize(first + row, 0);
            self.device
                .download(buffer, slot * row, &mut all[first..])?;
        }
        Ok(all)
    }

    fn write(&mut self, slot: usize, mut bytes: &[u8]) -> Result<(), EngineError> {
        for SlotPart { buffer, row, .. } in &self.parts {
            let (own, rest) = bytes.split_at(*row);
            self.device.upload(own, buffer, slot * row)?;
            bytes = rest;
        }
        Ok(())
    }

    fn parts(&self) -> Vec<ExpertPart> {
        let parts = self.parts.iter();
        let part = |part: &SlotPart<'_>| ExpertPart {
            bytes: part.row,
            dtype: part.dtype,
        };
        parts.map(part).collect()
    }
}

/// One rank among the ranks with replicas of its experts.
struct Replicas<'a> {
    ranks: &'a Ranks,
    placement: &'a Placement,
    mesh: Parallel,
    ep: usize,
    tp: usize,
}

/// One tensor's values of an expert.
pub(super) struct ExpertPart {
    bytes: usize,
    dtype: DType,
}

impl ExpertPart {
    fn elements(&self) -> usize {
        self.bytes / self.dtype.size()
    }
}

/// A replicated expert of this rank.
struct Replica {
    expert: usize,
    slot: usize,
    /// Whether this rank owns it.
    owned: bool,
}

/// The groups that send their values of an expert.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sender {
    Owner,
    Others,
}

impl Ranks {
    /// Sums the replicas of each expert over groups, in group order: every group gets the same
    /// bytes. The first dimension of each part counts this rank's experts. Does nothing without
    /// replicas.
    ///
    /// # Errors
    /// [`EngineError::Collective`].
    pub fn sum_replicas(&self, parts: &mut [&mut [f32]], what: &str) -> Result<(), EngineError> {
        let mut parts: Vec<&mut [u8]> = parts
            .iter_mut()
            .map(|part| bytemuck::cast_slice_mut(part))
            .collect();
        match self.replicas() {
            None => Ok(()),
            Some(replicas) => replicas.sum(&mut replicas.host(&mut parts), what),
        }
    }

    /// Copies the owner's values of each expert to the groups with replicas.
    ///
    /// # Errors
    /// [`EngineError::Collective`].
    pub fn broadcast_replicas(
        &self,
        parts: &mut [&mut [u8]],
        what: &str,
    ) -> Result<(), EngineError> {
        match self.replicas() {
            None => Ok(()),
            Some(replicas) => replicas.hand_out(&mut replicas.host(parts), what),
        }
    }

    /// As [`Ranks::sum_replicas`], wherever the values are stored.
    pub(super) fn sum_slots(&self, slots: &mut dyn Slots, what: &str) -> Result<(), EngineError> {
        match self.replicas() {
            None => Ok(()),
            Some(replicas) => replicas.sum(slots, what),
        }
    }

    fn replicas(&self) -> Option<Replicas<'_>> {
        let (mesh, place) = (self.mesh().parallel(), self.mesh().place());
        let placement = self.mesh().placement();
        Some(Replicas {
            ranks: self,
            placement: placement.filter(|placement| !placement.replicated().is_empty())?,
            mesh,
            ep: place.ep,
            tp: place.tp,
        })
    }
}

impl Replicas<'_> {
    fn host<'a, 't>(&self, parts: &'a mut [&'t mut [u8]]) -> Host<'a, 't> {
        Host {
            parts,
            experts: self.placement.count(self.ep),
        }
    }

    /// Returns the rank of a group with this rank's shard.
    fn peer(&self, group: usize) -> usize {
        group * self.mesh.expert_tp + self.tp
    }

    /// Returns this rank's replicated experts.
    fn own(&self) -> Vec<Replica> {
        let all = self.placement.replicated().into_iter();
        let own = all.filter_map(|expert| {
            let slot = self.placement.slot(self.ep, expert)?;
            Some(Replica {
                expert,
                slot,
                owned: self.placement.owner(expert) == self.ep,
            })
        });
        own.collect()
    }

    /// Returns the other groups that hold an expert.
    fn others(&self, expert: usize) -> Vec<usize> {
        let mut holders = self.placement.holders(expert).into_owned();
        holders.retain(|group| *group != self.ep);
        holders
    }

    fn sum(&self, slots: &mut dyn Slots, what: &str) -> Result<(), EngineError> {
        let parts = slots.parts();
        let mut arrived = self.trade(slots, Sender::Others, what)?.into_iter();
        for Replica { expert, slot, .. } in self.own().into_iter().filter(|one| one.owned) {
            // The owner sums for all groups and hands the result out, so that every replica gets
            // the same bytes.
            let mut rows: Vec<(usize, Vec<u8>)> = vec![(self.ep, slots.read(slot)?)];
            rows.extend(self.others(expert).into_iter().zip(arrived.by_ref()));
            // In the order of groups, whoever owns the expert: the sum must not change when the
            // owner does.
            rows.sort_by_key(|(group, _)| *group);
            let rows = rows.into_iter().map(|(_, row)| widened(&row, &parts));
            let sum = rows.reduce(added).unwrap_or_default();
            slots.write(slot, &rounded(&sum, &parts))?;
        }
        self.hand_out(slots, what)
    }

    fn hand_out(&self, slots: &mut dyn Slots, what: &str) -> Result<(), EngineError> {
        let arrived = self.trade(slots, Sender::Owner, what)?;
        let replicas = self.own().into_iter().filter(|one| !one.owned);
        for (replica, row) in replicas.zip(arrived) {
            slots.write(replica.slot, &row)?;
        }
        Ok(())
    }

    /// Exchanges the values of each replicated expert between its owner and the other groups that
    /// hold it. Returns those that arrived, in the order of experts, and of groups.
    fn trade(
        &self,
        slots: &dyn Slots,
        sender: Sender,
        what: &str,
    ) -> Result<Vec<Vec<u8>>, EngineError> {
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        let bytes = slots.parts().iter().map(|part| part.bytes).sum();
        for replica in self.own() {
            let groups = if replica.owned {
                self.others(replica.expert)
            } else {
                vec![self.placement.owner(replica.expert)]
            };
            let peers = groups.into_iter().map(|group| self.peer(group));
            if replica.owned == (sender == Sender::Owner) {
                let row = slots.read(replica.slot)?;
                sends.extend(peers.map(|peer| (peer, row.clone())));
            } else {
                receives.extend(peers.map(|peer| (peer, bytes)));
            }
        }
        let ranks = self.ranks;
        ranks.trade(&sends, &receives, ProcessGroup::Ep, what)
    }
}

/// Returns the values of an expert, of parts with these bytes and dtypes, as f32.
fn widened(mut bytes: &[u8], parts: &[ExpertPart]) -> Vec<f32> {
    let mut values = Vec::new();
    for part in parts {
        let (own, rest) = bytes.split_at(part.bytes);
        let own = Tensor {
            dtype: part.dtype,
            shape: vec![part.elements()],
            data: own.into(),
        };
        values.extend(own.to_f32());
        bytes = rest;
    }
    values
}

/// Returns the bytes of an expert's values, each rounded to the dtype of its part.
fn rounded(mut values: &[f32], parts: &[ExpertPart]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in parts {
        let (own, rest) = values.split_at(part.elements());
        let first = bytes.len();
        bytes.resize(first + part.bytes, 0);
        write_f32s(part.dtype, own, &mut bytes[first..]);
        values = rest;
    }
    bytes
}

fn added(mut sum: Vec<f32>, row: Vec<f32>) -> Vec<f32> {
    sum.iter_mut()
        .zip(row)
        .for_each(|(sum, value)| *sum += value);
    sum
}
