//! Addresses in device memory with an element type and a direction.

use moesaic_kernel::{Access, ParamType, Scalar};
use moesaic_target::{Arg, Buffer, Ptr};
use moesaic_tensor::Element;
use std::fmt;
use std::marker::PhantomData;

/// A value that can be passed to a kernel.
#[doc(hidden)]
pub trait Argument: Copy {
    /// The type of the parameter that it fits.
    const TYPE: ParamType;

    /// Returns it in the form that a launch takes.
    fn arg(self) -> Arg;
}

impl Argument for i64 {
    const TYPE: ParamType = ParamType::Scalar(Scalar::I64);

    fn arg(self) -> Arg {
        Arg::I64(self)
    }
}

impl Argument for f32 {
    const TYPE: ParamType = ParamType::Scalar(Scalar::F32);

    fn arg(self) -> Arg {
        Arg::F32(self)
    }
}

macro_rules! pointer {
    ($(#[$doc:meta])* $name:ident, $access:expr) => {
        $(#[$doc])*
        ///
        /// The element type is the caller's claim. Nothing follows the address until a launch does,
        /// and a launch is `unsafe` for that reason.
        pub struct $name<T>(Ptr, PhantomData<fn() -> T>);

        impl<T: Element> $name<T> {
            /// Points to the elements at `ptr`.
            pub const fn new(ptr: Ptr) -> Self {
                $name(ptr, PhantomData)
            }

            /// Points to the elements at the start of `buffer`, which must outlive the launches
            /// that use them.
            pub fn of(buffer: &Buffer) -> Self {
                Self::new(buffer.ptr())
            }

            /// Returns the address.
            pub const fn ptr(self) -> Ptr {
                self.0
            }
        }

        impl<T: Element> Argument for $name<T> {
            const TYPE: ParamType = ParamType::Tensor(T::DTYPE, $access);

            fn arg(self) -> Arg {
                Arg::Ptr(self.0)
            }
        }

        impl<T> Clone for $name<T> {
            fn clone(&self) -> Self {
                *self
            }
        }

        impl<T> Copy for $name<T> {}

        impl<T: Element> fmt::Debug for $name<T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "<{}>({:#x})"), T::DTYPE, self.0.0)
            }
        }
    };
}

pointer! {
    /// Device memory that a kernel only reads.
    In, Access::Read
}
pointer! {
    /// Device memory that a kernel only writes.
    Out, Access::Write
}
pointer! {
    /// Device memory that a kernel reads and writes.
    InOut, Access::ReadWrite
}

impl<T: Element> From<Out<T>> for In<T> {
    /// Passes one kernel's output to the next as its input.
    fn from(out: Out<T>) -> In<T> {
        In::new(out.ptr())
    }
}

impl<T: Element> From<InOut<T>> for In<T> {
    fn from(both: InOut<T>) -> In<T> {
        In::new(both.ptr())
    }
}

impl<T: Element> From<InOut<T>> for Out<T> {
    fn from(both: InOut<T>) -> Out<T> {
        Out::new(both.ptr())
    }
}
