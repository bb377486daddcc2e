//! Tables of typed function pointers.

/// Declares a struct of functions looked up in one library.
///
/// Each line is `name: fn(arguments) -> result = "symbol";`. The struct gets an `unsafe fn` of that
/// name for every function of the first block. Functions of the `optional` block become public
/// fields of type `Option<fn>`, `None` if the library lacks them. `load` takes a
/// [`Library`](crate::Library) and keeps it loaded for the life of the process.
#[macro_export]
macro_rules! dl_table {
    (
        $(#[$meta:meta])*
        $vis:vis struct $Table:ident {
            $($name:ident: fn($($arg:ident: $Arg:ty),* $(,)?) $(-> $Ret:ty)? = $symbol:literal;)*
        }
        $(optional {
            $($opt:ident: fn($($oarg:ident: $OArg:ty),* $(,)?) $(-> $ORet:ty)? = $osymbol:literal;)*
        })?
    ) => {
        $(#[$meta])*
        #[derive(Clone)]
        $vis struct $Table {
            $($name: unsafe extern "C" fn($($Arg),*) $(-> $Ret)?,)*
            $($(
                #[doc = concat!("`", $osymbol, "`, where the library has it.")]
                $vis $opt: Option<unsafe extern "C" fn($($OArg),*) $(-> $ORet)?>,
            )*)?
            library: String,
        }

        #[allow(dead_code)]
        impl $Table {
            /// Looks every function up.
            ///
            /// # Safety
            /// The signatures must match those of the library.
            ///
            /// # Errors
            /// [`MissingSymbol`]($crate::DlError::MissingSymbol) names the library and the first
            /// function it lacks.
            $vis unsafe fn load(library: $crate::Library) -> Result<$Table, $crate::DlError> {
                let table = $Table {
                    $(
                        // SAFETY: the caller vouches for the signature, and
                        // the library is kept loaded below.
                        $name: unsafe { library.symbol($symbol)? },
                    )*
                    $($(
                        // SAFETY: as above.
                        $opt: unsafe { library.symbol($osymbol).ok() },
                    )*)?
                    library: library.name().to_string(),
                };
                library.keep_loaded();
                Ok(table)
            }

            /// Returns the name or path by which the library was opened.
            $vis fn library(&self) -> &str {
                &self.library
            }

            $(
                #[doc = concat!("Calls `", $symbol, "`.")]
                ///
                /// # Safety
                /// The library's own contract applies.
                #[allow(clippy::too_many_arguments)]
                $vis unsafe fn $name(&self $(, $arg: $Arg)*) $(-> $Ret)? {
                    // SAFETY: the caller keeps the function's contract; the
                    // pointer is valid since the library is never unloaded.
                    unsafe { (self.$name)($($arg),*) }
                }
            )*
        }
    };
}
