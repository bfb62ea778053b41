//! The layouts against Intel's own header, where it is installed.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;

use qatzip::abi;

/// Where `qatzip.h` is: beside the headers named by the user, fetched by `make setup`, or
/// installed.
fn include() -> Option<PathBuf> {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let named = std::env::var_os("PLATEN_QAT_INCLUDE")
        .into_iter()
        .flat_map(|path| [PathBuf::from(&path), PathBuf::from(&path).join("..")]);
    named
        .chain([root.join("target/qat/root/usr/include"), PathBuf::from("/usr/include")])
        .find(|path| path.join("qatzip.h").is_file())
}

macro_rules! offsets {
    ($program:ident, $expected:ident, $($theirs:ident = $ours:ident { $($field:ident),* })*) => {$(
        let _ = writeln!($program, "printf(\"{0} %zu\\n\", sizeof({0}));", stringify!($theirs));
        let _ = writeln!($expected, "{} {}", stringify!($theirs), std::mem::size_of::<abi::$ours>());
        $(
            let _ = writeln!($program, "printf(\"{0}.{1} %zu\\n\", offsetof({0}, {1}));",
                stringify!($theirs), stringify!($field));
            let _ = writeln!($expected, "{}.{} {}", stringify!($theirs), stringify!($field),
                std::mem::offset_of!(abi::$ours, $field));
        )*
    )*};
}

macro_rules! values {
    ($program:ident, $expected:ident, $($name:ident),*) => {$(
        let _ = writeln!($program, "printf(\"{0} %lld\\n\", (long long)({0}));", stringify!($name));
        let _ = writeln!($expected, "{} {}", stringify!($name), abi::$name);
    )*};
}

#[test]
fn layouts_are_those_of_the_header() {
    let Some(include) = include() else {
        println!("skipped: no qatzip.h (libqatzip-dev); the compile-time asserts hold the layouts");
        return;
    };
    let mut program = String::from(
        "#include <stdio.h>\n#include <stddef.h>\n#include <stdint.h>\n#include \"qatzip.h\"\n",
    );
    // The functions are named, not called: their library need not be there.
    for function in [
        "qzSetLogLevel",
        "qzGetDefaultsDeflate",
        "qzSetDefaultsDeflate",
        "qzInit",
        "qzSetupSessionDeflate",
        "qzTeardownSession",
        "qzCompressExt",
        "qzDecompressExt",
    ] {
        let _ = writeln!(program, "#pragma weak {function}");
    }
    program.push_str("int main(void) {\n");
    let mut expected = String::new();
    offsets!(program, expected,
        QzSession_T = QzSession { hw_session_stat, thd_sess_stat, internal, total_in, total_out }
        QzSessionParamsCommon_T = QzSessionParamsCommon { direction, comp_lvl, comp_algorithm, max_forks,
            sw_backup, hw_buff_sz, strm_buff_sz, input_sz_thrshold, req_cnt_thrshold, wait_cnt_thrshold,
            polling_mode, is_sensitive_mode }
        QzSessionParamsDeflate_T = QzSessionParamsDeflate { common_params, huffman_hdr, data_fmt }
        QzStatus_T = QzStatus { qat_hw_count, qat_service_init, qat_mem_drvr, qat_instance_attach,
            memory_alloced, using_huge_pages, hw_session_status, algo_sw, algo_hw }
    );
    values!(
        program,
        expected,
        QZ_OK,
        QZ_DUPLICATE,
        QZ_BUF_ERROR,
        QZ_DATA_ERROR,
        QZ_NOSW_NO_HW,
        QZ_NOSW_NO_INST_ATTACH,
        QZ_NOSW_LOW_MEM,
        QZ_DYNAMIC_HDR,
        QZ_DIR_BOTH,
        QZ_DEFLATE_GZIP_EXT,
        QZ_DEFLATE,
        LOG_NONE,
        QZ_SW_EXECUTION_MASK
    );
    // What our own types say, against the header's prototypes: a mismatch is a warning, hence
    // -Werror.
    program.push_str(
        "QzLogLevel_T (*a)(QzLogLevel_T) = qzSetLogLevel;\n\
         int (*b)(QzSessionParamsDeflate_T *) = qzGetDefaultsDeflate;\n\
         int (*c)(QzSessionParamsDeflate_T *) = qzSetDefaultsDeflate;\n\
         int (*d)(QzSession_T *, unsigned char) = qzInit;\n\
         int (*e)(QzSession_T *, QzSessionParamsDeflate_T *) = qzSetupSessionDeflate;\n\
         int (*f)(QzSession_T *) = qzTeardownSession;\n\
         int (*h)(QzSession_T *, const unsigned char *, unsigned int *, unsigned char *, unsigned int *,\n\
             unsigned int, uint64_t *) = qzCompressExt;\n\
         int (*i)(QzSession_T *, const unsigned char *, unsigned int *, unsigned char *, unsigned int *,\n\
             uint64_t *) = qzDecompressExt;\n\
         return sizeof(a) + sizeof(b) + sizeof(c) + sizeof(d) + sizeof(e) + sizeof(f) + sizeof(h)\n\
             + sizeof(i) != 8 * sizeof(void (*)(void));\n}\n",
    );

    let folder = tempfile::tempdir().expect("a folder for the program");
    let source = folder.path().join("layout.c");
    let object = folder.path().join("layout");
    std::fs::write(&source, program).expect("the program is written");
    let compiled = Command::new("cc")
        .args(["-Wall", "-Werror", "-O0", "-I"])
        .arg(&include)
        .arg(&source)
        .arg("-o")
        .arg(&object)
        .output()
        .expect("a C compiler (build-essential) is needed to build platen at all");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let printed = Command::new(&object).output().expect("the program runs");
    assert_eq!(String::from_utf8_lossy(&printed.stdout), expected);
}
