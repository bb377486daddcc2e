//! The end of this process by a signal: its temporary folders are removed first.

use moesaic::target::scratch;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

/// What ends a process that is asked to.
const SIGNALS: [libc::c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// Whether one of them has come.
static ENDING: AtomicBool = AtomicBool::new(false);
/// Where the handler writes which one.
static PIPE: AtomicI32 = AtomicI32::new(-1);

/// Nothing but what a handler may do: it may have interrupted an allocation.
extern "C" fn heard(signal: libc::c_int) {
    ENDING.store(true, Ordering::SeqCst);
    let byte = signal as u8;
    // SAFETY: one byte that lives here; the pipe is never closed.
    unsafe { libc::write(PIPE.load(Ordering::SeqCst), (&raw const byte).cast(), 1) };
}

/// From now on a signal that ends this process removes its temporary folders before. Where that
/// cannot be arranged, signals do what they always do.
pub fn clean_up_at_the_end() {
    let Ok(mut signals) = pipe() else { return };
    let thread = std::thread::Builder::new().name("signals".to_string());
    let waiting = thread.spawn(move || {
        let mut signal = [0];
        if signals.read_exact(&mut signal).is_ok() {
            scratch::remove_all();
            end_by(libc::c_int::from(signal[0]));
        }
    });
    if waiting.is_ok() {
        SIGNALS.into_iter().for_each(listen);
    }
}

/// Does not return once the end has begun: what fails on the way, such as a compiler that got
/// the same signal, is no failure to tell.
pub fn leave_to_the_end() {
    while ENDING.load(Ordering::SeqCst) {
        std::thread::park();
    }
}

/// The reading end of the handler's pipe.
fn pipe() -> io::Result<File> {
    let mut ends: [RawFd; 2] = [-1; 2];
    // SAFETY: there is room for two descriptors.
    if unsafe { libc::pipe(ends.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    for end in ends {
        // SAFETY: numbers only; programs that this one starts do not get it.
        unsafe { libc::fcntl(end, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
    // SAFETY: both are new, and nobody else's.
    let [read, write] = ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) });
    PIPE.store(write.into_raw_fd(), Ordering::SeqCst);
    Ok(File::from(read))
}

/// What `nohup` and a shell's `&` have switched off stays off.
fn listen(signal: libc::c_int) {
    // SAFETY: an action is plain bits, of which all zero is one without flags and mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: the action lives here, and is only written.
    let known = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) };
    if known != 0 || action.sa_sigaction == libc::SIG_IGN {
        return;
    }
    action.sa_sigaction = heard as extern "C" fn(libc::c_int) as libc::sighandler_t;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: the handler does nothing that a handler must not.
    unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) };
}

/// Ends as if nobody had listened, so that a shell sees which signal it was.
fn end_by(signal: libc::c_int) {
    // SAFETY: numbers only.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::kill(libc::getpid(), signal);
    }
}
