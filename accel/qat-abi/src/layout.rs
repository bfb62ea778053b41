//! Structures, with their offsets asserted.

use crate::{CpaBoolean, CpaStatus};
use std::ffi::c_void;
use std::mem::{align_of, offset_of, size_of};

/// `CpaFlatBuffer`: one run of memory that is contiguous for the device.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CpaFlatBuffer {
    /// Bytes.
    pub dataLenInBytes: u32,
    /// Its start.
    pub pData: *mut u8,
}

/// `CpaBufferList`: a scatter-gather list.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CpaBufferList {
    /// Entries in `pBuffers`.
    pub numBuffers: u32,
    /// The entries.
    pub pBuffers: *mut CpaFlatBuffer,
    /// For the caller's use.
    pub pUserData: *mut c_void,
    /// Pinned memory of `cpaDcBufferListGetMetaSize` bytes for the device's form of the list.
    pub pPrivateMetaData: *mut c_void,
}

/// `CpaDcRqResults`: the result of a request, written before its callback.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CpaDcRqResults {
    /// `CpaDcReqStatus`.
    pub status: i32,
    /// Bytes written to the destination.
    pub produced: u32,
    /// Bytes read from the source.
    pub consumed: u32,
    /// In: the seed. Out: the running checksum of the plain data.
    pub checksum: u32,
    /// Decompression: the final block's end was reached.
    pub endOfLastBlock: CpaBoolean,
    /// Compression: the output is stored blocks.
    pub dataUncompressed: CpaBoolean,
}

/// `CpaDcSkipData`: bytes to skip; all 0 for none.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct CpaDcSkipData {
    /// `CpaDcSkipMode`, 0 for none.
    pub skipMode: u32,
    /// Bytes.
    pub skipLength: u32,
    /// Bytes.
    pub strideLength: u32,
    /// Bytes.
    pub firstSkipOffset: u32,
}

/// `CpaDcOpData`: options of a compress request.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CpaDcOpData {
    /// `CpaDcFlush`.
    pub flushFlag: u32,
    /// Decompress the output on the device and compare. 0 is refused (UNSUPPORTED) by 4xxx.
    pub compressAndVerify: CpaBoolean,
    /// If the comparison fails, return stored blocks.
    pub compressAndVerifyAndRecover: CpaBoolean,
    /// Not used by platen.
    pub integrityCrcCheck: CpaBoolean,
    /// Not used by platen.
    pub verifyHwIntegrityCrcs: CpaBoolean,
    /// Not used by platen.
    pub integrityCrcSize: u32,
    /// Not used by platen.
    pub inputSkipData: CpaDcSkipData,
    /// Not used by platen.
    pub outputSkipData: CpaDcSkipData,
    /// Not used by platen.
    pub pCrcData: *mut c_void,
}

/// `CpaDcSessionSetupData`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CpaDcSessionSetupData {
    /// `CpaDcCompLvl`, 1 to 12.
    pub compLevel: u32,
    /// `CpaDcCompType`.
    pub compType: u32,
    /// `CpaDcHuffType`.
    pub huffType: u32,
    /// `CpaDcAutoSelectBest`.
    pub autoSelectBestHuffmanTree: u32,
    /// `CpaDcSessionDir`.
    pub sessDirection: u32,
    /// `CpaDcSessionState`.
    pub sessState: u32,
    /// `CpaDcCompWindowSize`. QATzip 1.3.1 passes 7, which is no value of the enum; devices ignore
    /// it.
    pub windowSize: u32,
    /// `CpaDcCompMinMatch`, LZ4s only.
    pub minMatch: u32,
    /// `CpaDcCompLZ4BlockMaxSize`.
    pub lz4BlockMaxSize: u32,
    /// LZ4 only.
    pub lz4BlockChecksum: CpaBoolean,
    /// LZ4 only.
    pub lz4BlockIndependence: CpaBoolean,
    /// `CpaDcChecksum`.
    pub checksum: u32,
    /// LZ4 only.
    pub accumulateXXHash: CpaBoolean,
}

/// `CpaPhysicalInstanceId`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct CpaPhysicalInstanceId {
    /// The device.
    pub packageId: u16,
    /// The device's accelerator.
    pub acceleratorId: u16,
    /// The accelerator's engine.
    pub executionEngineId: u16,
    /// PCI bus, device and function.
    pub busAddress: u16,
    /// Key protection only.
    pub kptAcHandle: u32,
}

/// `CpaInstanceInfo2`. Texts end with a 0 byte.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CpaInstanceInfo2 {
    /// `CpaAccelerationServiceType`.
    pub accelerationServiceType: u32,
    /// The vendor.
    pub vendorName: [u8; 64],
    /// The device's name, such as "qat_4xxx".
    pub partName: [u8; 64],
    /// The library's version.
    pub swVersion: [u8; 64],
    /// Name of the instance.
    pub instName: [u8; 64],
    /// Unique name of the instance.
    pub instID: [u8; 128],
    /// The physical location.
    pub physInstId: CpaPhysicalInstanceId,
    /// Nearby CPUs, as a bit mask.
    pub coreAffinity: [u32; 128],
    /// NUMA node.
    pub nodeAffinity: u32,
    /// `CpaOperationalState`.
    pub operState: u32,
    /// The device needs physically contiguous memory.
    pub requiresPhysicallyContiguousMemory: CpaBoolean,
    /// Completions are polled.
    pub isPolled: CpaBoolean,
    /// Work is done by hardware.
    pub isOffloaded: CpaBoolean,
}

impl CpaInstanceInfo2 {
    /// All zero, to be filled by the library.
    pub const ZERO: Self = Self {
        accelerationServiceType: 0,
        vendorName: [0; 64],
        partName: [0; 64],
        swVersion: [0; 64],
        instName: [0; 64],
        instID: [0; 128],
        physInstId: CpaPhysicalInstanceId {
            packageId: 0,
            acceleratorId: 0,
            executionEngineId: 0,
            busAddress: 0,
            kptAcHandle: 0,
        },
        coreAffinity: [0; 128],
        nodeAffinity: 0,
        operState: 0,
        requiresPhysicallyContiguousMemory: 0,
        isPolled: 0,
        isOffloaded: 0,
    };
}

/// `CpaDcInstanceCapabilities`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct CpaDcInstanceCapabilities {
    /// LZS, LZSS and ELZS, stateful and stateless: obsolete.
    pub lzs: [CpaBoolean; 12],
    /// Stateful deflate, compress.
    pub statefulDeflateCompression: CpaBoolean,
    /// Stateful deflate, decompress.
    pub statefulDeflateDecompression: CpaBoolean,
    /// Stateless deflate, compress.
    pub statelessDeflateCompression: CpaBoolean,
    /// Stateless deflate, decompress.
    pub statelessDeflateDecompression: CpaBoolean,
    /// LZ4, compress.
    pub statelessLZ4Compression: CpaBoolean,
    /// LZ4, decompress.
    pub statelessLZ4Decompression: CpaBoolean,
    /// Stateful LZ4, decompress.
    pub statefulLZ4Decompression: CpaBoolean,
    /// LZ4s.
    pub statelessLZ4SCompression: CpaBoolean,
    /// CRC-32.
    pub checksumCRC32: CpaBoolean,
    /// Adler-32.
    pub checksumAdler32: CpaBoolean,
    /// xxHash-32.
    pub checksumXXHash32: CpaBoolean,
    /// Dynamic trees.
    pub dynamicHuffman: CpaBoolean,
    /// Dynamic trees need intermediate buffers.
    pub dynamicHuffmanBufferReq: CpaBoolean,
    /// Trees given by the caller.
    pub precompiledHuffman: CpaBoolean,
    /// Auto-select-best.
    pub autoSelectBestHuffmanTree: CpaBoolean,
    /// Bit per window size.
    pub validWindowSizeMaskCompression: u8,
    /// Bit per window size.
    pub validWindowSizeMaskDecompression: u8,
    /// Bytes.
    pub internalHuffmanMem: u32,
    /// `endOfLastBlock` is reported.
    pub endOfLastBlock: CpaBoolean,
    /// Parity errors are reported.
    pub reportParityError: CpaBoolean,
    /// Not used.
    pub batchAndPack: CpaBoolean,
    /// Compress-and-verify.
    pub compressAndVerify: CpaBoolean,
    /// The strict form of compress-and-verify.
    pub compressAndVerifyStrict: CpaBoolean,
    /// Compress-and-verify with recovery by stored blocks.
    pub compressAndVerifyAndRecover: CpaBoolean,
    /// Integrity CRCs.
    pub integrityCrcs: CpaBoolean,
    /// Chaining, a bit each.
    pub dcChainCapInfo: [u32; 1],
    /// 64-bit integrity CRCs.
    pub integrityCrcs64b: CpaBoolean,
}

/// A request's callback. `status` is SUCCESS or FAIL; the request's results have the details.
pub type CpaDcCallbackFn = Option<unsafe extern "C" fn(tag: *mut c_void, status: CpaStatus)>;

macro_rules! layout {
    ($type:ty, $size:expr, $($field:ident @ $offset:expr),* $(,)?) => {
        const _: () = {
            assert!(size_of::<$type>() == $size);
            $(assert!(offset_of!($type, $field) == $offset);)*
        };
    };
}

const _: () = assert!(size_of::<usize>() == 8 && align_of::<u64>() == 8);
layout!(CpaFlatBuffer, 16, dataLenInBytes @ 0, pData @ 8);
layout!(CpaBufferList, 32, numBuffers @ 0, pBuffers @ 8, pUserData @ 16, pPrivateMetaData @ 24);
layout!(CpaDcRqResults, 24, status @ 0, produced @ 4, consumed @ 8, checksum @ 12, endOfLastBlock @ 16,
    dataUncompressed @ 20);
layout!(CpaDcOpData, 64, flushFlag @ 0, compressAndVerify @ 4, compressAndVerifyAndRecover @ 8,
    integrityCrcCheck @ 12, verifyHwIntegrityCrcs @ 16, integrityCrcSize @ 20, inputSkipData @ 24,
    outputSkipData @ 40, pCrcData @ 56);
layout!(CpaDcSessionSetupData, 52, compLevel @ 0, compType @ 4, huffType @ 8, autoSelectBestHuffmanTree @ 12,
    sessDirection @ 16, sessState @ 20, windowSize @ 24, minMatch @ 28, lz4BlockMaxSize @ 32,
    lz4BlockChecksum @ 36, lz4BlockIndependence @ 40, checksum @ 44, accumulateXXHash @ 48);
layout!(CpaInstanceInfo2, 932, vendorName @ 4, partName @ 68, swVersion @ 132, instName @ 196, instID @ 260,
    physInstId @ 388, coreAffinity @ 400, nodeAffinity @ 912, operState @ 916,
    requiresPhysicallyContiguousMemory @ 920, isPolled @ 924, isOffloaded @ 928);
layout!(CpaDcInstanceCapabilities, 152, statelessDeflateCompression @ 56, statelessDeflateDecompression @ 60,
    statelessLZ4Compression @ 64, statelessLZ4Decompression @ 68, statelessLZ4SCompression @ 76,
    checksumCRC32 @ 80, checksumAdler32 @ 84, checksumXXHash32 @ 88, dynamicHuffman @ 92,
    validWindowSizeMaskCompression @ 108, validWindowSizeMaskDecompression @ 109, endOfLastBlock @ 116,
    compressAndVerify @ 128, compressAndVerifyAndRecover @ 136, integrityCrcs @ 140);
