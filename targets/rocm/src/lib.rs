//! The ROCm target: clang or HIPRTC in a child process.
