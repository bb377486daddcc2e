//! Linux system calls that the standard library does not have.

use std::ffi::{CString, c_int};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

/// A process, by the system's number.
pub type Pid = libc::pid_t;

fn done(code: c_int) -> io::Result<()> {
    match code {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Makes a named pipe that only this user can open.
pub fn make_fifo(path: &Path) -> io::Result<()> {
    let name = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: the name is a C string.
    done(unsafe { libc::mkfifo(name.as_ptr(), 0o600) })
}

/// Opens the reading end of a named pipe, whether or not a writer has opened it.
pub fn open_fifo(path: &Path) -> io::Result<File> {
    let mut options = fs::OpenOptions::new();
    options.read(true).custom_flags(libc::O_NONBLOCK).open(path)
}

/// Makes reads return at once from now on.
pub fn make_nonblocking(file: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the descriptor is open while it is borrowed; numbers only.
    done(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) })
}

/// Blocks the signals, and returns a file that is readable once one of them has come.
pub fn signals(list: &[c_int]) -> io::Result<File> {
    // SAFETY: a set of signals is plain bits, which `sigemptyset` makes empty.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set lives here, and the numbers are signals.
    unsafe {
        libc::sigemptyset(&raw mut set);
        list.iter().for_each(|signal| {
            libc::sigaddset(&raw mut set, *signal);
        });
    }
    // SAFETY: as above.
    done(unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) })?;
    // SAFETY: as above; -1 asks for a new descriptor.
    let fd = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
    done(fd)?;
    // SAFETY: the descriptor is new, and nobody else's.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// Returns the next signal of [`signals`], if one has come.
pub fn next_signal(signals: &File) -> Option<c_int> {
    let mut info = std::mem::MaybeUninit::<libc::signalfd_siginfo>::uninit();
    let size = size_of::<libc::signalfd_siginfo>();
    // SAFETY: the room is as large as what is read.
    let read = unsafe { libc::read(signals.as_raw_fd(), info.as_mut_ptr().cast(), size) };
    // SAFETY: the system fills it whole or not at all.
    (read == size as isize).then(|| unsafe { info.assume_init() }.ssi_signo as c_int)
}

/// A file to wait for, with the direction.
#[derive(Clone, Copy)]
pub struct FileWatch {
    pub file: RawFd,
    /// Whether to wait for room to write instead of something to read.
    pub write: bool,
}

/// Waits until one of the files is ready, for `longest` at most, and returns which files are.
pub fn wait(list: &[FileWatch], longest: Duration) -> io::Result<Vec<bool>> {
    let event = |watch: &FileWatch| {
        if watch.write {
            libc::POLLOUT
        } else {
            libc::POLLIN
        }
    };
    let mut polled: Vec<libc::pollfd> = list
        .iter()
        .map(|watch| libc::pollfd {
            fd: watch.file,
            events: event(watch),
            revents: 0,
        })
        .collect();
    let longest = longest.as_millis().min(60_000) as c_int;
    let count = polled.len() as libc::nfds_t;
    // SAFETY: the list has that many entries.
    let code = unsafe { libc::poll(polled.as_mut_ptr(), count, longest) };
    match done(code) {
        Err(error) if error.kind() != io::ErrorKind::Interrupted => Err(error),
        _ => Ok(polled.iter().map(|polled| polled.revents != 0).collect()),
    }
}

/// The end of a child process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    pub pid: Pid,
    /// The exit code, or 128 and the signal's number.
    pub code: u8,
}

/// Returns one child that has ended since the last call, if there is one.
pub fn reap() -> Option<Ended> {
    let mut status = 0;
    // SAFETY: the status is an int; no pointer is kept.
    let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
    let code = if libc::WIFSIGNALED(status) {
        128 + libc::WTERMSIG(status)
    } else {
        libc::WEXITSTATUS(status)
    };
    (pid > 0).then_some(Ended {
        pid,
        code: code as u8,
    })
}

/// Sends a signal to a process.
pub fn kill(pid: Pid, signal: c_int) {
    // SAFETY: no memory is passed. A process that has gone needs no signal.
    unsafe { libc::kill(pid, signal) };
}

/// Returns every process that this process and its children started. Those that lost their parent
/// are among them, because they went to the nearest process that called [`adopt_orphans`].
pub fn descendants() -> Vec<Pid> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pairs: Vec<(Pid, Pid)> = entries
        .filter_map(|entry| {
            let pid: Pid = entry.file_name().to_str()?.parse().ok()?;
            let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
            // The program's name comes first, in brackets, and may hold spaces and brackets itself.
            let mut fields = stat.rsplit_once(") ")?.1.split(' ');
            let state = fields.next()?;
            (state != "Z").then_some((pid, fields.next()?.parse().ok()?))
        })
        .collect();
    let mut found = vec![std::process::id() as Pid];
    let mut next = 0;
    while next < found.len() {
        let children = pairs.iter().filter(|(_, parent)| *parent == found[next]);
        let children: Vec<Pid> = children.map(|(pid, _)| *pid).collect();
        found.extend(children);
        next += 1;
    }
    found.split_off(1)
}

/// The role of a process after [`fork_keeper`].
pub enum Side {
    /// The process that called, with the number of the new one.
    First(Pid),
    Keeper,
}

/// Forks a second process into a session of its own, where no signal to the first one's group
/// reaches it. It gets SIGTERM when the first process ends, however that ends.
///
/// Call this in a process of one thread only: the child has no other threads, and a lock that one
/// of them held would stay locked.
pub fn fork_keeper() -> io::Result<Side> {
    let first = std::process::id() as Pid;
    // SAFETY: there is no other thread that could hold a lock.
    let pid = unsafe { libc::fork() };
    done(pid)?;
    if pid > 0 {
        return Ok(Side::First(pid));
    }
    // SAFETY: numbers only.
    done(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) })?;
    // SAFETY: nothing is passed.
    if unsafe { libc::getppid() } != first {
        return Err(io::Error::other("the process that was started is gone"));
    }
    // SAFETY: nothing is passed; a new process leads no group.
    done(unsafe { libc::setsid() })?;
    Ok(Side::Keeper)
}

/// Ends all [`descendants`] at once.
pub fn kill_descendants() {
    descendants()
        .into_iter()
        .for_each(|pid| kill(pid, libc::SIGKILL));
}

/// Makes this process the parent of orphans below it, in place of init.
pub fn adopt_orphans() -> io::Result<()> {
    // SAFETY: a number only.
    done(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) })
}

/// Prepares the child between fork and exec: it gets the signal when its parent ends, runs on
/// these processors if the list is not empty, and has all signals unblocked.
pub fn before_exec(at_parents_end: c_int, processors: &[usize]) -> io::Result<()> {
    // SAFETY: numbers only.
    done(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, at_parents_end) })?;
    // SAFETY: sets of signals and processors are plain bits, all zero is the empty one.
    let (mut signals, mut set): (libc::sigset_t, libc::cpu_set_t) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    // SAFETY: the set lives here.
    unsafe { libc::sigemptyset(&raw mut signals) };
    // SAFETY: as above.
    done(unsafe {
        libc::sigprocmask(libc::SIG_SETMASK, &raw const signals, std::ptr::null_mut())
    })?;
    if processors.is_empty() {
        return Ok(());
    }
    for processor in processors {
        // SAFETY: the numbers came out of such a set.
        unsafe { libc::CPU_SET(*processor, &mut set) };
    }
    // SAFETY: the set is this large; 0 is this thread.
    done(unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) })
}
