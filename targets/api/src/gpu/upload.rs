//! Uploads. The caller may change its bytes as soon as the call returns, but no driver promises to
//! have read them by then: CUDA promises it for synchronous copies only, HIP for none. A
//! synchronous copy does not help, because it goes to the default stream, which our streams do not
//! wait for, so it could overtake launches that still use the buffer.
//!
//! * A small upload, such as the input of a call, is copied to the stream's pinned memory, from
//!   where the driver reads it. The host continues at once.
//! * A large upload, such as weights, is read in place and waited for. The copy takes longer than
//!   the wait, and an extra copy by one thread would be slower than the bus.
//!
//! Neither can be part of a graph, which would read the memory again at each launch, so uploads are
//! refused during a capture.

use super::Vendor;
use super::lane::Lane;
use super::staging::{PIECE, Staging, start};
use crate::{DeviceError, Ptr};

pub(super) fn upload<V: Vendor>(lane: &Lane<V>, bytes: &[u8], to: Ptr) -> Result<(), DeviceError> {
    if bytes.len() <= PIECE {
        let mut staging = lane.staging();
        if staging.is_none() {
            *staging = Staging::new(&lane.gpu);
        }
        // Without pinned memory, small uploads are waited for too.
        if let Some(staging) = &mut *staging {
            let piece = staging.upload(lane.stream, bytes, to)?;
            let marked = staging.mark(piece, lane.stream);
            return marked.or_else(|_| lane.synchronize("upload"));
        }
    }
    // SAFETY: `bytes` are borrowed until the driver has read them, below.
    unsafe { start(&lane.gpu, lane.stream, bytes.as_ptr(), bytes.len(), to) }?;
    lane.synchronize("upload")
}
