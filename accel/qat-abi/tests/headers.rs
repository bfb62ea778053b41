//! The layouts against Intel's own headers, where they are installed.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;

/// Where the headers of libqat-dev are: named by the user, fetched by `make setup`, or installed.
fn include() -> Option<PathBuf> {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let named = std::env::var_os("PLATEN_QAT_INCLUDE").map(PathBuf::from);
    let fetched = PathBuf::from(root).join("target/qat/root/usr/include/qat");
    let installed = PathBuf::from("/usr/include/qat");
    named.into_iter().chain([fetched, installed]).find(|path| path.join("cpa_dc.h").is_file())
}

macro_rules! offsets {
    ($program:ident, $expected:ident, $($type:ident { $($field:ident),* })*) => {$(
        let _ = writeln!($program, "printf(\"{0} %zu\\n\", sizeof({0}));", stringify!($type));
        let _ = writeln!($expected, "{} {}", stringify!($type), std::mem::size_of::<qat_abi::$type>());
        $(
            let _ = writeln!($program, "printf(\"{0}.{1} %zu\\n\", offsetof({0}, {1}));", stringify!($type), stringify!($field));
            let _ = writeln!($expected, "{}.{} {}", stringify!($type), stringify!($field),
                std::mem::offset_of!(qat_abi::$type, $field));
        )*
    )*};
}

#[test]
fn layouts_are_those_of_the_headers() {
    let Some(include) = include() else {
        println!("skipped: no cpa_dc.h (libqat-dev) on this machine; the compile-time asserts hold the layouts");
        return;
    };
    let mut program = String::from(
        "#include <stdio.h>\n#include <stddef.h>\n#include \"cpa.h\"\n#include \"cpa_dc.h\"\nint main(void) {\n",
    );
    let mut expected = String::new();
    offsets!(program, expected,
        CpaFlatBuffer { dataLenInBytes, pData }
        CpaBufferList { numBuffers, pBuffers, pUserData, pPrivateMetaData }
        CpaDcRqResults { status, produced, consumed, checksum, endOfLastBlock, dataUncompressed }
        CpaDcSkipData { skipMode, skipLength, strideLength, firstSkipOffset }
        CpaDcOpData { flushFlag, compressAndVerify, compressAndVerifyAndRecover, integrityCrcCheck,
            verifyHwIntegrityCrcs, integrityCrcSize, inputSkipData, outputSkipData, pCrcData }
        CpaDcSessionSetupData { compLevel, compType, huffType, autoSelectBestHuffmanTree, sessDirection, sessState,
            windowSize, minMatch, lz4BlockMaxSize, lz4BlockChecksum, lz4BlockIndependence, checksum,
            accumulateXXHash }
        CpaPhysicalInstanceId { packageId, acceleratorId, executionEngineId, busAddress, kptAcHandle }
        CpaInstanceInfo2 { accelerationServiceType, vendorName, partName, swVersion, instName, instID, physInstId,
            coreAffinity, nodeAffinity, operState, requiresPhysicallyContiguousMemory, isPolled, isOffloaded }
        CpaDcInstanceCapabilities { statefulDeflateCompression, statefulDeflateDecompression,
            statelessDeflateCompression, statelessDeflateDecompression, statelessLZ4Compression,
            statelessLZ4Decompression, statefulLZ4Decompression, statelessLZ4SCompression, checksumCRC32,
            checksumAdler32, checksumXXHash32, dynamicHuffman, dynamicHuffmanBufferReq, precompiledHuffman,
            autoSelectBestHuffmanTree, validWindowSizeMaskCompression, validWindowSizeMaskDecompression,
            internalHuffmanMem, endOfLastBlock, reportParityError, batchAndPack, compressAndVerify,
            compressAndVerifyStrict, compressAndVerifyAndRecover, integrityCrcs, dcChainCapInfo, integrityCrcs64b }
    );
    // Constants whose value the headers only imply.
    for (name, value) in [
        ("CPA_DC_FLUSH_FINAL", i64::from(qat_abi::CPA_DC_FLUSH_FINAL)),
        ("CPA_DC_HT_FULL_DYNAMIC", i64::from(qat_abi::CPA_DC_HT_FULL_DYNAMIC)),
        ("CPA_DC_DEFLATE", i64::from(qat_abi::CPA_DC_DEFLATE)),
        ("CPA_DC_LZ4S", i64::from(qat_abi::CPA_DC_LZ4S)),
        ("CPA_DC_CRC32", i64::from(qat_abi::CPA_DC_CRC32)),
        ("CPA_DC_XXHASH32", i64::from(qat_abi::CPA_DC_XXHASH32)),
        ("CPA_DC_DIR_COMBINED", i64::from(qat_abi::CPA_DC_DIR_COMBINED)),
        ("CPA_DC_STATELESS", i64::from(qat_abi::CPA_DC_STATELESS)),
        ("CPA_DC_WINSIZE_32K", i64::from(qat_abi::CPA_DC_WINSIZE_32K)),
        ("CPA_DC_OVERFLOW", i64::from(qat_abi::CPA_DC_OVERFLOW)),
        ("CPA_DC_VERIFY_ERROR", i64::from(qat_abi::CPA_DC_VERIFY_ERROR)),
        ("CPA_STATUS_RESTARTING", i64::from(qat_abi::CPA_STATUS_RESTARTING)),
        ("CPA_INSTANCE_EVENT_FATAL_ERROR", i64::from(qat_abi::CPA_INSTANCE_EVENT_FATAL_ERROR)),
        (
            "CPA_ACC_SVC_TYPE_DATA_COMPRESSION",
            i64::from(qat_abi::CPA_ACC_SVC_TYPE_DATA_COMPRESSION),
        ),
    ] {
        let _ = writeln!(program, "printf(\"{name} %lld\\n\", (long long)({name}));");
        let _ = writeln!(expected, "{name} {value}");
    }
    program.push_str("return 0; }\n");

    let folder = tempfile::tempdir().expect("a folder for the program");
    let source = folder.path().join("layout.c");
    let binary = folder.path().join("layout");
    std::fs::write(&source, program).expect("the program is written");
    let compiled =
        Command::new("cc").arg("-I").arg(&include).arg(&source).arg("-o").arg(&binary).output();
    let compiled =
        compiled.expect("a C compiler (build-essential) is needed to build platen at all");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let printed = Command::new(&binary).output().expect("the program runs");
    assert_eq!(String::from_utf8_lossy(&printed.stdout), expected);
}
