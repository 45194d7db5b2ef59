// Lets a torch that was built for the CPU take fake tensors (torch._subclasses.FakeTensorMode) on "cuda:0". Such
// tensors have shapes, types and devices but no memory, so nothing ever runs there: torch only has to believe that the
// device exists, and that every stream of it is at rest. One GPU, number 0, with its default stream.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

const Device gpu(c10::DeviceType::CUDA, 0);
const Stream at_rest(Stream::DEFAULT, gpu);

struct IdleGuard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
    DeviceIndex deviceCount() const noexcept override { return 1; }
    Device getDevice() const override { return gpu; }
    Device exchangeDevice(Device) const override { return gpu; }
    void setDevice(Device) const override {}
    void uncheckedSetDevice(Device) const noexcept override {}
    Stream getStream(Device) const override { return at_rest; }
    Stream getDefaultStream(Device) const override { return at_rest; }
    Stream getNewStream(Device, int) const override { return at_rest; }
    Stream getStreamFromGlobalPool(Device, bool) const override { return at_rest; }
    Stream exchangeStream(Stream) const override { return at_rest; }
    bool queryStream(const Stream&) const override { return true; }
    void synchronizeStream(const Stream&) const override {}
    void record(void**, const Stream&, DeviceIndex, c10::EventFlag) const override {}
    void block(void*, const Stream&) const override {}
    bool queryEvent(void*) const override { return true; }
};

const IdleGuard idle;

}  // namespace

namespace at {

// Found by this very name when torch first asks about CUDA.
struct CUDAHooks final : CUDAHooksInterface {
    explicit CUDAHooks(CUDAHooksArgs) {}
    void init() const override {}
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasCUDA() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    int getNumGPUs() const override { return 1; }
    DeviceIndex deviceCount() const override { return 1; }
    DeviceIndex current_device() const override { return 0; }
    DeviceIndex getCurrentDevice() const override { return 0; }
    DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
    DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
    void setCurrentDevice(DeviceIndex) const override {}
    void deviceSynchronize(DeviceIndex) const override {}
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

extern "C" void install() {
    c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&idle);
}
