//! The functions of a GPU driver. CUDA and HIP declare them alike: the names differ, arguments and
//! codes are the same.

use std::ffi::{c_char, c_int, c_uint, c_void};

macro_rules! handles {
    ($($(#[$meta:meta])* $Name:ident;)*) => {$(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(transparent)]
        pub struct $Name(pub *mut c_void);

        // SAFETY: drivers accept their handles on every thread, and nobody else follows the
        // pointer.
        unsafe impl Send for $Name {}
        // SAFETY: as above.
        unsafe impl Sync for $Name {}
    )*};
}

handles! {
    /// A stream of the driver.
    StreamHandle;
    /// A loaded module.
    ModuleHandle;
    /// A kernel of a loaded module.
    FunctionHandle;
    /// An event.
    EventHandle;
    /// A captured graph.
    GraphHandle;
    /// A graph that can be launched.
    ExecHandle;
    /// A memory pool.
    PoolHandle;
}

/// The access of one GPU to the memory of a pool, in the form of both drivers: `CUmemAccessDesc`,
/// `hipMemAccessDesc`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PoolAccess {
    /// The kind of place that `id` is the number of; 1 for a GPU.
    pub place: c_int,
    /// The GPU that has the access.
    pub id: c_int,
    /// 3 for reads and writes.
    pub access: c_int,
}

impl PoolAccess {
    /// Returns the access of a GPU that reads and writes.
    pub(super) fn of(gpu: c_int) -> PoolAccess {
        PoolAccess {
            place: 1,
            id: gpu,
            access: 3,
        }
    }
}

/// The null handle.
pub(super) const NULL: *mut c_void = std::ptr::null_mut();

macro_rules! functions {
    ($($name:ident($($Arg:ty),*);)*) => {
        /// The functions of a driver. Each returns a code, 0 for success. Addresses of device
        /// memory are 64-bit integers.
        #[derive(Clone, Copy)]
        #[allow(missing_docs)]
        pub struct Functions {
            $(pub $name: unsafe extern "C" fn($($Arg),*) -> c_int,)*
        }

        /// The names of [`Functions`] in the driver's library.
        #[derive(Clone, Copy, Debug)]
        #[allow(missing_docs)]
        pub struct FunctionNames {
            $(pub $name: &'static str,)*
        }

        impl Functions {
            /// Looks every function up; `symbol` returns the address of a name.
            ///
            /// # Safety
            /// Each address must be that of a function with the field's signature, and must stay
            /// valid.
            ///
            /// # Errors
            /// The errors of `symbol`.
            pub unsafe fn load<E>(
                names: &FunctionNames,
                mut symbol: impl FnMut(&'static str) -> Result<*const c_void, E>,
            ) -> Result<Functions, E> {
                Ok(Functions {
                    $($name: {
                        let address = symbol(names.$name)?;
                        // SAFETY: the caller vouches for the signature.
                        unsafe {
                            std::mem::transmute::<
                                *const c_void,
                                unsafe extern "C" fn($($Arg),*) -> c_int,
                            >(address)
                        }
                    },)*
                })
            }
        }
    };
}

functions! {
    memory_info(*mut usize, *mut usize);
    default_pool(*mut PoolHandle, c_int);
    pool_set(PoolHandle, c_int, *mut c_void);
    pool_access(PoolHandle, *const PoolAccess, usize);
    can_access_peer(*mut c_int, c_int, c_int);

    stream_create(*mut StreamHandle, c_uint);
    stream_destroy(StreamHandle);
    stream_synchronize(StreamHandle);
    stream_wait(StreamHandle, EventHandle, c_uint);

    alloc_async(*mut u64, usize, StreamHandle);
    free_async(u64, StreamHandle);
    alloc(*mut u64, usize);
    free(u64);
    host_alloc(*mut *mut c_void, usize, c_uint);
    host_free(*mut c_void);
    upload(u64, *const c_void, usize, StreamHandle);
    download(*mut c_void, u64, usize, StreamHandle);
    copy(u64, u64, usize, StreamHandle);

    module_load(*mut ModuleHandle, *const c_void);
    module_unload(ModuleHandle);
    module_function(*mut FunctionHandle, ModuleHandle, *const c_char);
    launch(
        FunctionHandle,
        c_uint, c_uint, c_uint,
        c_uint, c_uint, c_uint,
        c_uint,
        StreamHandle,
        *mut *mut c_void,
        *mut *mut c_void
    );
    occupancy(*mut c_int, FunctionHandle, c_int, usize);

    event_create(*mut EventHandle, c_uint);
    event_record(EventHandle, StreamHandle);
    event_query(EventHandle);
    event_synchronize(EventHandle);
    event_elapsed(*mut f32, EventHandle, EventHandle);
    event_destroy(EventHandle);

    capture_begin(StreamHandle, c_int);
    capture_end(StreamHandle, *mut GraphHandle);
    graph_instantiate(*mut ExecHandle, GraphHandle, u64);
    graph_launch(ExecHandle, StreamHandle);
    graph_destroy(GraphHandle);
    exec_destroy(ExecHandle);
}
