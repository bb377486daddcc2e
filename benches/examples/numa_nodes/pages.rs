//! Information from Linux about nodes, pages and threads.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

/// The system's number of a NUMA node.
pub type Node = i32;

/// A range of the process's memory: an address and a length in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    pub start: usize,
    pub bytes: usize,
}

pub fn page_size() -> usize {
    // SAFETY: only a query.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// Returns the node of each page of a range that starts at a page boundary and is not in use. A
/// page whose node is unknown gets a negative number.
pub fn nodes(range: Range) -> io::Result<Vec<Node>> {
    unmark(range);
    let end = range.start + range.bytes;
    let pages: Vec<usize> = (range.start..end).step_by(page_size()).collect();
    let mut nodes: Vec<Node> = vec![-1; pages.len()];
    let (of_this_process, stay, no_flags) = (0, std::ptr::null::<Node>(), 0);
    // SAFETY: both lists have the given length, and without target nodes the call moves nothing and
    // only reports where pages lie.
    let failed = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            of_this_process,
            pages.len(),
            pages.as_ptr(),
            stay,
            nodes.as_mut_ptr(),
            no_flags,
        )
    } != 0;
    if failed {
        Err(io::Error::last_os_error())
    } else {
        Ok(nodes)
    }
}

/// Removes the marks of automatic NUMA balancing: a kernel that balances nodes marks pages to see
/// who uses them, and does not report the node of marked ones. Changing the protection removes the
/// marks.
fn unmark(range: Range) {
    let pages = range.bytes / page_size() * page_size();
    for allowed in [libc::PROT_READ, libc::PROT_READ | libc::PROT_WRITE] {
        // SAFETY: these are whole pages that nobody uses meanwhile, and afterwards all access is
        // allowed again. A refusal changes nothing.
        unsafe { libc::mprotect(range.start as *mut libc::c_void, pages, allowed) };
    }
}

/// Counts the pages on each node.
pub fn count(nodes: &[Node]) -> BTreeMap<Node, usize> {
    let mut counts = BTreeMap::new();
    for node in nodes {
        *counts.entry(*node).or_insert(0) += 1;
    }
    counts
}

/// Returns the node that the calling thread runs on now.
pub fn node_here() -> Option<Node> {
    let (mut processor, mut node) = (0u32, 0u32);
    let nothing = std::ptr::null_mut::<u8>();
    // SAFETY: both numbers are live, and the kernel ignores the third argument.
    let failed =
        unsafe { libc::syscall(libc::SYS_getcpu, &raw mut processor, &raw mut node, nothing) } != 0;
    if failed {
        None
    } else {
        Node::try_from(node).ok()
    }
}

/// Returns the nodes of the machine with their processors, as `node0: 0-3`.
pub fn machine() -> Vec<String> {
    let of = |name: &str, folder: &Path| {
        let list = fs::read_to_string(folder.join("cpulist")).ok()?;
        Some(format!("{name}: {}", list.trim()))
    };
    listed("/sys/devices/system/node", "node", of)
}

/// Returns the threads of this process with the processors that each may use.
pub fn threads() -> Vec<String> {
    let of = |_: &str, folder: &Path| {
        let name = fs::read_to_string(folder.join("comm")).ok()?;
        let status = fs::read_to_string(folder.join("status")).ok()?;
        let may = |line: &str| Some(line.strip_prefix("Cpus_allowed_list:")?.trim().to_string());
        let may = status.lines().find_map(may)?;
        Some(format!("{}: {may}", name.trim()))
    };
    listed("/proc/self/task", "", of)
}

/// Returns a text for each numbered entry of a folder, in order.
fn listed(folder: &str, prefix: &str, of: impl Fn(&str, &Path) -> Option<String>) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let numbered = entries.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let number: u32 = name.strip_prefix(prefix)?.parse().ok()?;
        Some((number, of(&name, &entry.path())?))
    });
    let lines: BTreeMap<u32, String> = numbered.collect();
    lines.into_values().collect()
}

/// Binds the calling thread to the first processor that it may use.
pub fn stay() -> io::Result<()> {
    // SAFETY: a set of processors is plain bits, and all zero is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    let (this_thread, bytes) = (0, size_of_val(&set));
    // SAFETY: the set has this size.
    if unsafe { libc::sched_getaffinity(this_thread, bytes, &raw mut set) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let numbers = 0..libc::CPU_SETSIZE as usize;
    // SAFETY: every number is below CPU_SETSIZE.
    let others = numbers.filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) });
    for cpu in others.skip(1).collect::<Vec<_>>() {
        // SAFETY: as above.
        unsafe { libc::CPU_CLR(cpu, &mut set) };
    }
    // SAFETY: as for sched_getaffinity.
    match unsafe { libc::sched_setaffinity(this_thread, bytes, &raw const set) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
