//! Signals that end this process: it removes its temporary folders first. A write behind the limit
//! on the sizes of files is an error instead.

use moesaic::target::scratch;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

/// The signals that ask a process to end.
const SIGNALS: [libc::c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// A flag that is set once one of the signals has arrived.
static ENDING: AtomicBool = AtomicBool::new(false);
/// The write end of the pipe through which the handler passes the signal on.
static PIPE: AtomicI32 = AtomicI32::new(-1);

/// Handles a signal. The handler may have interrupted an allocation, so it does only what is
/// async-signal-safe: it stores and writes.
extern "C" fn heard(signal: libc::c_int) {
    // The flag comes first: once the byte is written, the clean-up makes the work of other
    // threads fail, and the flag keeps them from reporting it.
    ENDING.store(true, Ordering::SeqCst);
    let byte = signal as u8;
    // SAFETY: one byte that lives here; the pipe is never closed.
    unsafe { libc::write(PIPE.load(Ordering::SeqCst), (&raw const byte).cast(), 1) };
}

/// Does nothing, so that the write which went behind the limit returns an error.
extern "C" fn passed(_: libc::c_int) {}

/// Makes a write behind the limit on the sizes of files (`ulimit -f`) an error, as one on a full
/// disk is: the signal would end the process and leave half a file. Programs that this one starts
/// have the signal's default effect, which is why it has a handler and is not ignored.
pub fn report_too_large_files() {
    listen(libc::SIGXFSZ, passed);
}

/// Makes signals that end this process remove its temporary folders first. If the pipe or the
/// thread cannot be made, signals keep their default effect.
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
        SIGNALS.into_iter().for_each(|signal| listen(signal, heard));
    }
}

/// Blocks for ever once a signal has arrived. Later failures are consequences of it, such as a
/// compiler that received the same signal, and must not be reported.
pub fn leave_to_the_end() {
    while ENDING.load(Ordering::SeqCst) {
        std::thread::park();
    }
}

/// Makes the handler's pipe, and returns its read end.
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

/// Installs the handler, unless `nohup` or a shell's `&` has made this process ignore the signal.
fn listen(signal: libc::c_int, handler: extern "C" fn(libc::c_int)) {
    // SAFETY: an action is plain bits, and the all-zero action is one without flags and mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: the action lives here, and is only written.
    let known = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) };
    if known != 0 || action.sa_sigaction == libc::SIG_IGN {
        return;
    }
    action.sa_sigaction = handler as libc::sighandler_t;
    // System calls in flight go on until the signals thread ends the process, so that no other
    // thread reports an interrupted call as a failure of its own.
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: the handler is async-signal-safe.
    unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) };
}

/// Ends the process by the signal's default action, so that a shell sees which signal it was.
fn end_by(signal: libc::c_int) {
    // SAFETY: numbers only.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::kill(libc::getpid(), signal);
    }
}
