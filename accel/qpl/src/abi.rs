//! The layout of `qpl_job` and the constants that this driver uses: `qpl/c_api` of libqpl 1.9.0
//! (MIT). A test compiles the real headers and compares.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// `qpl_aux_data`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct QplAuxData {
    compress_state_ptr: *mut u8,
    decompress_state_ptr: *mut u8,
    analytics_state_ptr: *mut u8,
    middle_layer_buffer_ptr: *mut u8,
    hw_state_ptr: *mut u8,
    path: c_uint,
}

/// `qpl_job`. libqpl keeps its own state behind it.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct QplJob {
    pub(crate) next_in_ptr: *mut u8,
    pub(crate) available_in: u32,
    pub(crate) total_in: u32,
    pub(crate) next_out_ptr: *mut u8,
    pub(crate) available_out: u32,
    pub(crate) total_out: u32,
    pub(crate) op: c_uint,
    pub(crate) flags: u32,
    pub(crate) crc: u32,
    xor_checksum: u32,
    last_bit_offset: u32,
    pub(crate) level: c_uint,
    statistics_mode: c_uint,
    pub(crate) huffman_table: *mut c_void,
    pub(crate) dictionary: *mut c_void,
    mini_block_size: c_uint,
    idx_array: *mut u64,
    idx_max_size: u32,
    idx_num_written: u32,
    decomp_end_processing: u8,
    ignore_start_bits: u8,
    ignore_end_bits: u8,
    crc64_poly: u64,
    crc64: u64,
    next_src2_ptr: *mut u8,
    available_src2: u32,
    src1_bit_width: u32,
    src2_bit_width: u32,
    num_input_elements: u32,
    out_bit_width: c_uint,
    param_low: u32,
    param_high: u32,
    drop_initial_bytes: u32,
    initial_output_index: u32,
    parser: c_uint,
    first_index_min_value: u32,
    last_index_max_value: u32,
    sum_value: u32,
    pub(crate) numa_id: i32,
    data_ptr: QplAuxData,
}

pub(crate) const PATH_HARDWARE: c_uint = 1;
pub(crate) const PATH_SOFTWARE: c_uint = 2;
pub(crate) const OP_COMPRESS: c_uint = 1;
pub(crate) const LEVEL_DEFAULT: c_uint = 1;
pub(crate) const FLAG_FIRST: u32 = 0x0001;
pub(crate) const FLAG_LAST: u32 = 0x0002;
pub(crate) const FLAG_DYNAMIC_HUFFMAN: u32 = 0x2000;
pub(crate) const FLAG_OMIT_VERIFY: u32 = 0x4000;
/// `QPL_DEVICE_NUMA_ID_ANY` is -3; this is the library's own default, the caller's socket.
pub(crate) const NUMA_SOCKET: i32 = -1;

pub(crate) type GetVersion = unsafe extern "C" fn() -> *const c_char;
pub(crate) type GetJobSize = unsafe extern "C" fn(c_uint, *mut u32) -> c_int;
pub(crate) type InitJob = unsafe extern "C" fn(c_uint, *mut QplJob) -> c_int;
pub(crate) type OnJob = unsafe extern "C" fn(*mut QplJob) -> c_int;

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Write as _;
    use std::path::PathBuf;
    use std::process::Command;

    /// Where the headers of libqpl-dev are: those that `scripts/fetch-qpl` unpacked.
    fn include() -> Option<PathBuf> {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
        let fetched = PathBuf::from(root).join("target/qpl/root/usr/include");
        [fetched, "/usr/include".into()].into_iter().find(|path| path.join("qpl/qpl.h").is_file())
    }

    #[test]
    fn the_layout_is_that_of_the_headers() {
        let Some(include) = include() else {
            assert!(
                std::env::var_os("PLATEN_SKIP_QPL").is_some(),
                "no qpl/qpl.h: run scripts/fetch-qpl, or set PLATEN_SKIP_QPL=1"
            );
            println!("skipped: no qpl/qpl.h (libqpl-dev), by PLATEN_SKIP_QPL");
            return;
        };
        let mut program = String::from(
            "#include <stdio.h>\n#include <stddef.h>\n#include <qpl/qpl.h>\nint main(void) {\n",
        );
        let mut expected = String::new();
        let _ = writeln!(program, "printf(\"size %zu\\n\", sizeof(qpl_job));");
        let _ = writeln!(expected, "size {}", size_of::<QplJob>());
        macro_rules! fields {
            ($($field:ident),*) => {$(
                let _ = writeln!(program, "printf(\"{0} %zu %zu\\n\", offsetof(qpl_job, {0}), sizeof(((qpl_job *)0)->{0}));", stringify!($field));
                let _ = writeln!(expected, "{} {} {}", stringify!($field), std::mem::offset_of!(QplJob, $field), size_in(|job: &QplJob| &job.$field));
            )*};
        }
        /// The size of the field that `of` returns; it is not called.
        fn size_in<T>(_of: impl Fn(&QplJob) -> &T) -> usize {
            size_of::<T>()
        }
        fields!(
            next_in_ptr,
            available_in,
            total_in,
            next_out_ptr,
            available_out,
            total_out,
            op,
            flags,
            crc,
            xor_checksum,
            last_bit_offset,
            level,
            statistics_mode,
            huffman_table,
            dictionary,
            mini_block_size,
            idx_array,
            idx_max_size,
            idx_num_written,
            decomp_end_processing,
            ignore_start_bits,
            ignore_end_bits,
            crc64_poly,
            crc64,
            next_src2_ptr,
            available_src2,
            src1_bit_width,
            src2_bit_width,
            num_input_elements,
            out_bit_width,
            param_low,
            param_high,
            drop_initial_bytes,
            initial_output_index,
            parser,
            first_index_min_value,
            last_index_max_value,
            sum_value,
            numa_id,
            data_ptr
        );
        for (name, value) in [
            ("qpl_path_hardware", i64::from(PATH_HARDWARE)),
            ("qpl_path_software", i64::from(PATH_SOFTWARE)),
            ("qpl_op_compress", i64::from(OP_COMPRESS)),
            ("qpl_default_level", i64::from(LEVEL_DEFAULT)),
            ("QPL_FLAG_FIRST", i64::from(FLAG_FIRST)),
            ("QPL_FLAG_LAST", i64::from(FLAG_LAST)),
            ("QPL_FLAG_DYNAMIC_HUFFMAN", i64::from(FLAG_DYNAMIC_HUFFMAN)),
            ("QPL_FLAG_OMIT_VERIFY", i64::from(FLAG_OMIT_VERIFY)),
            ("QPL_DEVICE_NUMA_ID_SOCKET", i64::from(NUMA_SOCKET)),
            ("QPL_STS_BEING_PROCESSED", i64::from(crate::Status::BEING_PROCESSED.0)),
            ("QPL_STS_MORE_OUTPUT_NEEDED", i64::from(crate::Status::MORE_OUTPUT_NEEDED.0)),
            ("QPL_STS_QUEUES_ARE_BUSY_ERR", i64::from(crate::Status::QUEUES_ARE_BUSY.0)),
            ("QPL_STS_DST_IS_SHORT_ERR", i64::from(crate::Status::DST_IS_SHORT.0)),
            ("QPL_STS_INTL_OUTPUT_OVERFLOW", i64::from(crate::Status::OUTPUT_OVERFLOW.0)),
        ] {
            let _ = writeln!(program, "printf(\"{name} %lld\\n\", (long long)({name}));");
            let _ = writeln!(expected, "{name} {value}");
        }
        program.push_str("return 0; }\n");
        let folder = tempfile::tempdir().expect("a folder for the program");
        let (source, binary) = (folder.path().join("layout.c"), folder.path().join("layout"));
        std::fs::write(&source, program).expect("the program is written");
        let mut compiler = Command::new("cc");
        compiler.arg("-I").arg(&include).arg(&source).arg("-o").arg(&binary);
        let compiled = compiler.output().expect("platen's build needs a C compiler anyway");
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
        let printed = Command::new(&binary).output().expect("the program runs");
        assert_eq!(String::from_utf8_lossy(&printed.stdout), expected);
    }
}
