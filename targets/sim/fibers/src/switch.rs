//! Switching from one stack to another.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use std::arch::naked_asm;

/// The stack pointer of a context that does not run; its registers lie above.
pub(crate) type Context = *mut u8;

/// Saves the registers that a call preserves, stores the stack pointer in
/// `from`, loads `to` and restores its registers. Execution continues where
/// `to` was left.
///
/// # Safety
/// `to` was left by this function or made by [`prepare`], its stack still
/// exists, and it is resumed once.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn switch(from: *mut Context, to: Context) {
    naked_asm!(
        "push rbp",
        "push rbx",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "mov [rdi], rsp",
        "mov rsp, rsi",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbx",
        "pop rbp",
        "ret",
    )
}

/// Returns a context that starts `entry` on the stack that ends at `top`, a
/// multiple of 16. `entry` never returns.
///
/// # Safety
/// The 64 bytes below `top` are writable and nobody else's.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn prepare(top: *mut u8, entry: extern "C" fn() -> !) -> Context {
    // A function starts eight bytes off a multiple of 16, after `ret` has
    // taken its address; six registers lie below.
    // SAFETY: both places lie in the bytes the caller gives.
    unsafe {
        let address = top.sub(16).cast::<usize>();
        address.write(entry as usize);
        address.sub(6).cast()
    }
}

/// Switches as on x86-64; saves the ten integer and eight float registers that
/// a call preserves, the frame pointer and the return address.
///
/// # Safety
/// As on x86-64.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn switch(from: *mut Context, to: Context) {
    naked_asm!(
        "sub sp, sp, #160",
        "stp x19, x20, [sp]",
        "stp x21, x22, [sp, #16]",
        "stp x23, x24, [sp, #32]",
        "stp x25, x26, [sp, #48]",
        "stp x27, x28, [sp, #64]",
        "stp x29, x30, [sp, #80]",
        "stp d8, d9, [sp, #96]",
        "stp d10, d11, [sp, #112]",
        "stp d12, d13, [sp, #128]",
        "stp d14, d15, [sp, #144]",
        "mov x9, sp",
        "str x9, [x0]",
        "mov sp, x1",
        "ldp x19, x20, [sp]",
        "ldp x21, x22, [sp, #16]",
        "ldp x23, x24, [sp, #32]",
        "ldp x25, x26, [sp, #48]",
        "ldp x27, x28, [sp, #64]",
        "ldp x29, x30, [sp, #80]",
        "ldp d8, d9, [sp, #96]",
        "ldp d10, d11, [sp, #112]",
        "ldp d12, d13, [sp, #128]",
        "ldp d14, d15, [sp, #144]",
        "add sp, sp, #160",
        "ret",
    )
}

/// Returns a context as on x86-64.
///
/// # Safety
/// The 160 bytes below `top` are writable and nobody else's.
#[cfg(target_arch = "aarch64")]
pub(crate) unsafe fn prepare(top: *mut u8, entry: extern "C" fn() -> !) -> Context {
    // SAFETY: the return address lies in the bytes the caller gives.
    unsafe {
        let context = top.sub(160);
        context.add(88).cast::<usize>().write(entry as usize);
        context
    }
}

/// True on machines that fibers are written for.
pub(crate) const HERE: bool = cfg!(any(target_arch = "x86_64", target_arch = "aarch64"));

/// Does nothing: no device opens where fibers are not written.
///
/// # Safety
/// None.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) unsafe extern "C" fn switch(_: *mut Context, _: Context) {}

/// Does nothing, likewise.
///
/// # Safety
/// None.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) unsafe fn prepare(top: *mut u8, _: extern "C" fn() -> !) -> Context {
    top
}
