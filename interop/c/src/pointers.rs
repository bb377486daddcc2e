//! The caller's pointers as references.

use crate::status::Failure;
use std::ffi::{CStr, c_char};

/// Returns what a handle or a structure of the caller points at.
///
/// # Safety
/// The pointer is NULL, or of a live value that nobody changes meanwhile.
pub unsafe fn borrow<'a, T>(pointer: *const T, name: &'static str) -> Result<&'a T, Failure> {
    // SAFETY: the caller vouches for it.
    unsafe { pointer.as_ref() }.ok_or(Failure::Null(name))
}

/// Returns `count` elements; NULL is allowed for none.
///
/// # Safety
/// The pointer is NULL, or of that many live values that nobody changes meanwhile.
pub unsafe fn slice<'a, T>(
    pointer: *const T,
    count: usize,
    name: &'static str,
) -> Result<&'a [T], Failure> {
    match (pointer.is_null(), count) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(Failure::Null(name)),
        (false, count) if count > isize::MAX as usize / size_of::<T>().max(1) => {
            Err(Failure::argument(
                name,
                format!("has {count} elements, more than memory holds"),
            ))
        }
        // SAFETY: the caller vouches for it.
        (false, count) => Ok(unsafe { std::slice::from_raw_parts(pointer, count) }),
    }
}

/// Returns a text.
///
/// # Safety
/// The pointer is NULL, or of a text that ends in NUL and that nobody changes meanwhile.
pub unsafe fn text<'a>(pointer: *const c_char, name: &'static str) -> Result<&'a str, Failure> {
    if pointer.is_null() {
        return Err(Failure::Null(name));
    }
    // SAFETY: the caller vouches for it.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map_err(|_| Failure::NotUtf8(name))
}

/// Returns a text, or none for NULL.
///
/// # Safety
/// As [`text`].
pub unsafe fn optional_text<'a>(
    pointer: *const c_char,
    name: &'static str,
) -> Result<Option<&'a str>, Failure> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller vouches for it.
    unsafe { text(pointer, name) }.map(Some)
}

/// A place for one value of the caller's.
pub struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Takes the place, which a function asks for before it works: a failure then wastes nothing.
    ///
    /// # Safety
    /// The pointer is NULL, or of memory for a value.
    pub unsafe fn new(pointer: *mut T, name: &'static str) -> Result<Out<T>, Failure> {
        if pointer.is_null() {
            return Err(Failure::Null(name));
        }
        Ok(Out(pointer))
    }

    /// Writes the value.
    pub fn set(self, value: T) {
        // SAFETY: the caller of `new` vouched for the memory; what was there is not read.
        unsafe { self.0.write(value) }
    }
}

impl<T> Out<*mut T> {
    /// Takes the place for a handle, and makes it NULL until there is one.
    ///
    /// # Safety
    /// As [`Out::new`].
    pub unsafe fn handle(pointer: *mut *mut T) -> Result<Out<*mut T>, Failure> {
        // SAFETY: the caller vouches for it.
        let place = unsafe { Out::new(pointer, "out") }?;
        // SAFETY: as above.
        unsafe { pointer.write(std::ptr::null_mut()) };
        Ok(place)
    }

    /// Gives the caller a handle.
    pub fn give(self, value: T) {
        self.set(Box::into_raw(Box::new(value)));
    }
}

/// Ends a handle; NULL is none.
///
/// # Safety
/// The pointer is NULL or came from [`Out::give`], and nobody uses it any more.
pub unsafe fn free<T>(pointer: *mut T) {
    if !pointer.is_null() {
        crate::status::guard(|| {
            // SAFETY: the caller vouches for it.
            drop(unsafe { Box::from_raw(pointer) });
            Ok(())
        });
    }
}
