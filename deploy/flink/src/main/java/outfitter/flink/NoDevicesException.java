package outfitter.flink;

/** Why there are no devices. Flink logs it and goes on without infos, if {@code on-failure} is {@code continue}. */
final class NoDevicesException extends Exception {

    private static final long serialVersionUID = 1L;

    NoDevicesException(String message) {
        super(message);
    }
}
