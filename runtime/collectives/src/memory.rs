//! Host-visible memory of an operation.

use crate::Slice;
use moesaic_kernel::Target;
use moesaic_target::{Buffer, Device, DeviceError};
use std::sync::Arc;

/// Memory that messages are sent from or received into: the buffer itself on a CPU, a host copy
/// of any other device's buffer.
pub(crate) struct Region {
    address: *mut u8,
    bytes: usize,
    owner: Owner,
    /// The slice that the copy is written back to once everything has been received.
    back: Option<Slice>,
}

/// The owner that keeps the memory alive.
enum Owner {
    Buffer { _buffer: Arc<Buffer> },
    Host(Box<[u8]>),
}

// SAFETY: an address together with the owner of its memory; each access justifies itself.
unsafe impl Send for Region {}

impl Region {
    /// Returns the slice's contents, after all earlier launches have run.
    pub fn input(device: &dyn Device, slice: &Slice) -> Result<Region, DeviceError> {
        if let Some(region) = Region::direct(device, slice)? {
            return Ok(region);
        }
        let mut bytes = vec![0; slice.bytes()];
        device.download(slice.buffer(), slice.offset(), &mut bytes)?;
        Ok(Region::host(bytes))
    }

    /// Returns memory that will be written to the slice.
    pub fn output(device: &dyn Device, slice: &Slice) -> Result<Region, DeviceError> {
        if let Some(region) = Region::direct(device, slice)? {
            return Ok(region);
        }
        Ok(Region {
            back: Some(slice.clone()),
            ..Region::host(vec![0; slice.bytes()])
        })
    }

    /// Returns memory for a slice that is both read and written.
    pub fn both(device: &dyn Device, slice: &Slice) -> Result<Region, DeviceError> {
        Ok(Region {
            back: Region::output(device, slice)?.back,
            ..Region::input(device, slice)?
        })
    }

    /// Returns a region of host memory.
    pub fn host(bytes: Vec<u8>) -> Region {
        let mut bytes = bytes.into_boxed_slice();
        Region {
            address: bytes.as_mut_ptr(),
            bytes: bytes.len(),
            owner: Owner::Host(bytes),
            back: None,
        }
    }

    /// Returns the buffer itself where it is a CPU's, since those lie at ordinary addresses.
    fn direct(device: &dyn Device, slice: &Slice) -> Result<Option<Region>, DeviceError> {
        if !matches!(device.info().target, Target::Cpu(_)) {
            return Ok(None);
        }
        device.synchronize()?;
        Ok(Some(Region {
            address: std::ptr::with_exposed_provenance_mut(slice.address() as usize),
            bytes: slice.bytes(),
            owner: Owner::Buffer {
                _buffer: Arc::clone(slice.buffer()),
            },
            back: None,
        }))
    }

    /// Returns the address of `offset`, if `bytes` bytes fit behind it.
    pub fn at(&self, offset: usize, bytes: usize) -> Option<*mut u8> {
        let end = offset.checked_add(bytes)?;
        (end <= self.bytes).then(|| self.address.wrapping_add(offset))
    }

    /// Writes a host copy back to its slice.
    pub fn write_back(&self, device: &dyn Device) -> Result<(), DeviceError> {
        match (&self.back, &self.owner) {
            (Some(slice), Owner::Host(bytes)) => {
                device.upload(bytes, slice.buffer(), slice.offset())
            }
            _ => Ok(()),
        }
    }

    /// Returns what was received into host memory.
    pub fn into_host(self) -> Vec<u8> {
        match self.owner {
            Owner::Host(bytes) => bytes.into_vec(),
            Owner::Buffer { .. } => Vec::new(),
        }
    }
}
