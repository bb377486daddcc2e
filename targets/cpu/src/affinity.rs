//! The processors on which threads may run.

use std::io;
use std::thread::JoinHandle;

/// Keeps each thread on one of some processors, starting with the second and
/// going around.
#[cfg(target_os = "linux")]
pub(crate) fn spread<'a>(
    threads: impl Iterator<Item = &'a JoinHandle<()>>,
    processors: &[usize],
) -> io::Result<()> {
    let places = processors.iter().cycle().skip(1);
    for (thread, processor) in threads.zip(places) {
        keep_on(thread, *processor)?;
    }
    Ok(())
}

/// Does nothing: elsewhere threads stay where the system puts them.
#[cfg(not(target_os = "linux"))]
pub(crate) fn spread<'a>(
    _: impl Iterator<Item = &'a JoinHandle<()>>,
    _: &[usize],
) -> io::Result<()> {
    let reason = "threads are pinned on Linux only";
    Err(io::Error::new(io::ErrorKind::Unsupported, reason))
}

/// Returns the processors that this process may use, ascending.
///
/// # Errors
/// The error of the system.
#[cfg(target_os = "linux")]
pub fn processors() -> io::Result<Vec<usize>> {
    // SAFETY: a set of processors is plain bits, all zero is the empty one.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is this large; 0 is this thread.
    let failed = unsafe { libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) } != 0;
    if failed {
        return Err(io::Error::last_os_error());
    }
    let most = libc::CPU_SETSIZE as usize;
    // SAFETY: every number is below CPU_SETSIZE.
    let list: Vec<usize> = (0..most)
        .filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) })
        .collect();
    if list.is_empty() {
        Err(io::Error::other("this process may use no processor"))
    } else {
        Ok(list)
    }
}

/// Returns an empty list: elsewhere the processors are unknown.
///
/// # Errors
/// None.
#[cfg(not(target_os = "linux"))]
pub fn processors() -> io::Result<Vec<usize>> {
    Ok(Vec::new())
}

/// Returns the processor on which the calling thread runs now.
#[cfg(target_os = "linux")]
pub(crate) fn processor() -> Option<usize> {
    // SAFETY: asks only.
    usize::try_from(unsafe { libc::sched_getcpu() }).ok()
}

/// Returns `None`: elsewhere the processor is unknown.
#[cfg(not(target_os = "linux"))]
pub(crate) fn processor() -> Option<usize> {
    None
}

#[cfg(target_os = "linux")]
fn keep_on(thread: &JoinHandle<()>, processor: usize) -> io::Result<()> {
    use std::os::unix::thread::JoinHandleExt;
    // SAFETY: as above.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the number came out of such a set.
    unsafe { libc::CPU_SET(processor, &mut set) };
    // SAFETY: the thread is not joined while its handle is borrowed.
    let code = unsafe {
        libc::pthread_setaffinity_np(thread.as_pthread_t(), size_of_val(&set), &raw const set)
    };
    match code {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}
