//! Loads and stores.

use super::ClusterRunner;
use super::lanes::scalar_sign;
use super::state::global::GlobalAccess;
use super::warp::{Doubles, Warp, Words, lanes_of};
use crate::code::layout::{LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW};
use crate::code::op::{Address, Base, MemoryAccess, MemoryOrder, NONE};
use crate::finding::{Fault, FindingKind, Step};
use crate::memory::{Allocation, Touch};
use crate::text::StateSpace;
use std::sync::Arc;

/// Returns the addresses of an access, 64 bits each.
#[inline(always)]
pub fn addresses(warp: &Warp, address: &Address) -> Doubles {
    let mut out = [0; 32];
    match address.base {
        Base::Word(row) => {
            let row = warp.word(row);
            let offset = address.offset as u32;
            for lane in 0..32 {
                out[lane] = u64::from(row[lane].wrapping_add(offset));
            }
        }
        Base::Double(row) => {
            let row = warp.double(row);
            let offset = address.offset.cast_unsigned();
            for lane in 0..32 {
                out[lane] = row[lane].wrapping_add(offset);
            }
        }
        Base::Fixed => out = [address.offset.cast_unsigned(); 32],
    }
    out
}

/// Returns the space and the offset of a generic address.
pub fn space_of(address: u64) -> (StateSpace, u64) {
    match address {
        SHARED_WINDOW.. => (StateSpace::Shared, address - SHARED_WINDOW),
        LOCAL_WINDOW.. => (StateSpace::Local, address - LOCAL_WINDOW),
        PARAM_WINDOW.. => (StateSpace::Param, address - PARAM_WINDOW),
        _ => (StateSpace::Global, address),
    }
}

/// The part of an access that goes to one address space.
pub struct SpacePart {
    pub space: StateSpace,
    /// Offsets within the space, by lane.
    pub addresses: Doubles,
    /// Lanes of the part.
    pub mask: u32,
}

impl ClusterRunner<'_> {
    /// Resolves generic addresses: splits a mask into one part per space.
    pub fn resolve(&self, space: StateSpace, addresses: &Doubles, mask: u32) -> Vec<SpacePart> {
        if space != StateSpace::Generic {
            return vec![SpacePart {
                space,
                addresses: *addresses,
                mask,
            }];
        }
        let mut parts: Vec<SpacePart> = Vec::new();
        for lane in lanes_of(mask) {
            let (space, address) = space_of(addresses[lane]);
            let known = parts.iter().position(|part| part.space == space);
            let at = known.unwrap_or_else(|| {
                parts.push(SpacePart {
                    space,
                    addresses: [0; 32],
                    mask: 0,
                });
                parts.len() - 1
            });
            parts[at].addresses[lane] = address;
            parts[at].mask |= 1 << lane;
        }
        parts
    }

    #[inline]
    pub fn load(&mut self, warp: &mut Warp, access: &MemoryAccess, mask: u32) -> Step<()> {
        let addresses = addresses(warp, &access.address);
        match access.space {
            StateSpace::Shared => self.load_shared(warp, access, &addresses, mask),
            StateSpace::Global | StateSpace::Const => {
                self.load_global(warp, access, &addresses, mask)
            }
            StateSpace::Param => self.load_param(warp, access, &addresses, mask),
            StateSpace::Local => self.load_local(warp, access, &addresses, mask),
            StateSpace::Generic => {
                for part in self.resolve(StateSpace::Generic, &addresses, mask) {
                    let (addresses, mask) = (&part.addresses, part.mask);
                    match part.space {
                        StateSpace::Shared => self.load_shared(warp, access, addresses, mask)?,
                        StateSpace::Local => self.load_local(warp, access, addresses, mask)?,
                        StateSpace::Param => self.load_param(warp, access, addresses, mask)?,
                        _ => self.load_global(warp, access, addresses, mask)?,
                    }
                }
                Ok(())
            }
        }
    }

    #[inline]
    pub fn store(&mut self, warp: &mut Warp, access: &MemoryAccess, mask: u32) -> Step<()> {
        self.changes += 1;
        let addresses = addresses(warp, &access.address);
        match access.space {
            StateSpace::Shared => self.store_shared(warp, access, &addresses, mask),
            StateSpace::Local => self.store_local(warp, access, &addresses, mask),
            StateSpace::Generic => {
                for part in self.resolve(StateSpace::Generic, &addresses, mask) {
                    let (addresses, mask) = (&part.addresses, part.mask);
                    match part.space {
                        StateSpace::Shared => self.store_shared(warp, access, addresses, mask)?,
                        StateSpace::Local => self.store_local(warp, access, addresses, mask)?,
                        _ => self.store_global(warp, access, addresses, mask)?,
                    }
                }
                Ok(())
            }
            _ => self.store_global(warp, access, &addresses, mask),
        }
    }

    /// Writes loaded bits to the registers of an access.
    #[inline(always)]
    pub fn deliver(&self, warp: &mut Warp, access: &MemoryAccess, values: &[Doubles], mask: u32) {
        for (row, value) in access.rows.iter().zip(values) {
            if *row == NONE {
                continue;
            }
            let extended = scalar_sign(access, value);
            let value = extended.as_ref().unwrap_or(value);
            if access.wide {
                warp.put_double(*row, value, mask);
            } else {
                let mut words: Words = [0; 32];
                for lane in 0..32 {
                    words[lane] = value[lane] as u32;
                }
                warp.put(*row, &words, mask);
            }
        }
    }

    /// Returns the bits that lane `lane` stores as element `at`.
    #[inline(always)]
    pub fn stored(&self, warp: &Warp, access: &MemoryAccess, at: usize, lane: usize) -> u64 {
        if access.wide {
            warp.double(access.rows[at])[lane]
        } else {
            u64::from(warp.word(access.rows[at])[lane])
        }
    }

    fn load_param(
        &mut self,
        warp: &mut Warp,
        access: &MemoryAccess,
        addresses: &Doubles,
        mask: u32,
    ) -> Step<()> {
        let bytes = access.bytes as usize;
        let mut values = vec![[0; 32]; access.rows.len()];
        for lane in lanes_of(mask) {
            let start = (addresses[lane] & (PARAM_WINDOW - 1)) as usize;
            for (at, value) in values.iter_mut().enumerate() {
                let from = self
                    .launch
                    .params
                    .get(start + at * bytes..start + (at + 1) * bytes);
                let from = from.ok_or_else(|| {
                    outside(
                        1 << lane,
                        "reads",
                        bytes,
                        StateSpace::Param,
                        start as u64,
                        "beyond them",
                    )
                })?;
                value[lane] = little(from);
            }
        }
        self.deliver(warp, access, &values, mask);
        Ok(())
    }

    fn local_range(&self, address: u64, bytes: usize, lane: usize) -> Step<std::ops::Range<usize>> {
        let size = self.kernel.local_bytes as usize;
        let start = address as usize;
        if start.checked_add(bytes).is_none_or(|end| end > size) {
            let where_ = format!("a thread has {size}");
            return Err(outside(
                1 << lane,
                "touches",
                bytes,
                StateSpace::Local,
                address,
                &where_,
            ));
        }
        Ok(lane * size + start..lane * size + start + bytes)
    }

    fn load_local(
        &mut self,
        warp: &mut Warp,
        access: &MemoryAccess,
        addresses: &Doubles,
        mask: u32,
    ) -> Step<()> {
        let bytes = access.bytes as usize;
        let mut values = vec![[0; 32]; access.rows.len()];
        for lane in lanes_of(mask) {
            for (at, value) in values.iter_mut().enumerate() {
                let range = self.local_range(addresses[lane] + (at * bytes) as u64, bytes, lane)?;
                value[lane] = little(&warp.local[range]);
            }
        }
        self.deliver(warp, access, &values, mask);
        Ok(())
    }

    fn store_local(
        &mut self,
        warp: &mut Warp,
        access: &MemoryAccess,
        addresses: &Doubles,
        mask: u32,
    ) -> Step<()> {
        let bytes = access.bytes as usize;
        for lane in lanes_of(mask) {
            for at in 0..access.rows.len() {
                let range = self.local_range(addresses[lane] + (at * bytes) as u64, bytes, lane)?;
                let value = self.stored(warp, access, at, lane).to_le_bytes();
                warp.local[range].copy_from_slice(&value[..bytes]);
            }
        }
        Ok(())
    }

    /// Returns the region and offset of an access to global memory.
    #[inline(always)]
    pub fn global(
        &mut self,
        verb: &str,
        address: u64,
        bytes: usize,
        lane: u32,
    ) -> Step<(usize, usize)> {
        // The order of these checks decides the finding. An address that is
        // both outside and misaligned is reported as outside, because the
        // alignment of a wild pointer says nothing.
        self.after_launches(verb, lane)?;
        let Some(region) = self.launch.regions.find(address, bytes, self.hint) else {
            return Err(self.not_global(verb, address, bytes, lane));
        };
        // PTX ISA, "Addresses as Operands": an address must be aligned to the
        // size of the whole access, for vectors to the vector and not to its
        // element.
        if !address.is_multiple_of(bytes as u64) {
            return Err(misaligned(
                1 << lane,
                verb,
                bytes,
                StateSpace::Global,
                address,
            ));
        }
        self.hint = region;
        let offset = (address - self.launch.regions.list[region].base) as usize;
        Ok((region, offset))
    }

    /// Refuses an access of a thread that has not waited for the launches
    /// before.
    #[inline(always)]
    pub fn after_launches(&self, verb: &str, lane: u32) -> Step<()> {
        match self.early >> lane & 1 {
            0 => Ok(()),
            _ => Err(early(verb, lane)),
        }
    }

    #[cold]
    fn not_global(&self, verb: &str, address: u64, bytes: usize, lane: u32) -> Box<Fault> {
        let place = self.launch.regions.describe(address);
        outside(1 << lane, verb, bytes, StateSpace::Global, address, &place)
    }

    /// Records a read and checks that the bytes were written.
    #[inline(always)]
    pub fn note_read(
        &mut self,
        access_constant: bool,
        region: usize,
        offset: usize,
        bytes: usize,
        lanes: u32,
    ) -> Step<()> {
        let allocation = &self.launch.regions.list[region];
        let valid = allocation.valid.all(offset, bytes);
        // `ld.global.nc` promises that the bytes do not change during the
        // launch. The log keeps such reads apart and compares them with writes
        // by any block.
        if access_constant && valid {
            self.launch
                .log
                .constant(self.launch.regions, region, offset, bytes);
            return Ok(());
        }
        // Bytes that this block wrote itself are valid for it before the launch
        // ends; other blocks' writes become valid with the merge of their logs.
        if !valid && !self.log.wrote(region, offset, &allocation.valid, bytes) {
            return Err(unwritten(allocation, offset, bytes, lanes));
        }
        self.log.touch(Touch::Read, region, offset, bytes, self.pc);
        Ok(())
    }

    fn load_global(
        &mut self,
        warp: &mut Warp,
        access: &MemoryAccess,
        addresses: &Doubles,
        mask: u32,
    ) -> Step<()> {
        let (element, count) = (access.bytes as usize, access.rows.len());
        let bytes = element * count;
        self.tally.global(false, addresses, mask, bytes as u64);
        let mut values = [[0; 32]; 8];
        let constant = access.constant && access.order == MemoryOrder::Weak;
        // ptxas may move a non-coherent load across `griddepcontrol.wait`,
        // since it is free to assume that nobody writes there.
        if constant && self.launch.dependent {
            return Err(movable(mask));
        }
        // A full warp that reads one run of bytes, the usual case, is checked
        // and logged once instead of 32 times.
        let run = contiguous(addresses, mask, bytes as u64);
        let mut places = [(0, 0); 32];
        for lane in lanes_of(mask) {
            let (region, offset) = self.global("reads", addresses[lane], bytes, lane as u32)?;
            places[lane] = (region, offset);
            match run {
                Some(length) if lane == 0 => {
                    if self.launch.regions.list[region].holds(addresses[0], length) {
                        self.note_read(constant, region, offset, length, mask)?;
                    }
                }
                Some(_) => {}
                None => self.note_read(constant, region, offset, bytes, 1 << lane)?,
            }
            let allocation = &self.launch.regions.list[region];
            for (at, value) in values[..count].iter_mut().enumerate() {
                value[lane] = allocation.read(offset + at * element, element);
            }
        }
        if access.order == MemoryOrder::Weak && !constant {
            self.global_reads(warp, &places, bytes, mask)?;
        }
        self.order_after(warp, access.order, StateSpace::Global, addresses, mask);
        self.deliver(warp, access, &values[..count], mask);
        Ok(())
    }

    fn store_global(
        &mut self,
        warp: &mut Warp,
        access: &MemoryAccess,
        addresses: &Doubles,
        mask: u32,
    ) -> Step<()> {
        let (element, count) = (access.bytes as usize, access.rows.len());
        let bytes = element * count;
        self.tally.global(true, addresses, mask, bytes as u64);
        self.order_before(warp, access.order, StateSpace::Global, addresses, mask);
        let touch = match access.order {
            MemoryOrder::Weak => Touch::Write,
            _ => Touch::Atomic,
        };
        for lane in lanes_of(mask) {
            let (region, offset) = self.global("writes", addresses[lane], bytes, lane as u32)?;
            self.log.touch(touch, region, offset, bytes, self.pc);
            let allocation = Arc::clone(&self.launch.regions.list[region]);
            // Whether the store changes anything matters to the race check: two
            // threads that store the value already there do no harm.
            let mut same = true;
            for at in 0..count {
                let value = self.stored(warp, access, at, lane);
                let mask = u64::MAX >> (64 - 8 * element);
                same &= allocation.read(offset + at * element, element) == value & mask;
            }
            let access_of = GlobalAccess {
                region,
                offset,
                bytes,
                lane,
                atomic: touch == Touch::Atomic,
            };
            self.global_write(warp, access_of, same)?;
            for at in 0..count {
                let value = self.stored(warp, access, at, lane);
                allocation.write(offset + at * element, element, value);
            }
        }
        Ok(())
    }
}

/// Returns the bytes that a full warp covers without a gap, lane after lane.
#[inline(always)]
fn contiguous(addresses: &Doubles, mask: u32, bytes: u64) -> Option<usize> {
    if mask != u32::MAX {
        return None;
    }
    let mut same = true;
    for lane in 1..32 {
        same &= addresses[lane] == addresses[0].wrapping_add(lane as u64 * bytes);
    }
    same.then_some(32 * bytes as usize)
}

/// Returns the little-endian integer of up to eight bytes.
pub fn little(bytes: &[u8]) -> u64 {
    let mut whole = [0; 8];
    whole[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(whole)
}

#[cold]
fn unwritten(allocation: &Allocation, offset: usize, bytes: usize, lanes: u32) -> Box<Fault> {
    Fault::new(
        FindingKind::UninitialisedGlobal,
        lanes,
        format!(
            "reads {bytes} bytes of global memory that nothing has written, \
             at byte {offset} of an allocation of {} bytes",
            allocation.bytes
        ),
    )
}

/// Returns the fault of an access outside every allocation.
#[cold]
pub fn outside(
    lanes: u32,
    verb: &str,
    bytes: usize,
    space: StateSpace,
    address: u64,
    place: &str,
) -> Box<Fault> {
    Fault::new(
        FindingKind::OutOfBounds,
        lanes,
        format!(
            "{verb} {bytes} bytes of {} memory at {address:#x}: {place}",
            space.name()
        ),
    )
}

/// Returns the fault of an address that is not a multiple of the access.
#[cold]
pub fn misaligned(
    lanes: u32,
    verb: &str,
    bytes: usize,
    space: StateSpace,
    address: u64,
) -> Box<Fault> {
    Fault::new(
        FindingKind::Misaligned,
        lanes,
        format!(
            "{verb} {bytes} bytes of {} memory at {address:#x}, which is no multiple of {bytes}",
            space.name()
        ),
    )
}

#[cold]
fn movable(lanes: u32) -> Box<Fault> {
    let text = "reads with ld.global.nc, which nobody may write during the launch: the assembler \
                may have it before `griddepcontrol.wait`, when its writer still runs; pointers of \
                such a kernel are not `__restrict__`";
    Fault::new(FindingKind::LaunchOrder, lanes, text.to_string())
}

#[cold]
fn early(verb: &str, lane: u32) -> Box<Fault> {
    let text = format!(
        "{verb} global memory before `griddepcontrol.wait`: the launches before this one may \
         still run"
    );
    Fault::new(FindingKind::LaunchOrder, 1 << lane, text)
}
